//! A server's log, as it grows.

use std::{
    io::{BufRead, BufReader, Read, Write},
    path::Path,
    sync::{Arc, Condvar, Mutex},
    thread,
    time::Duration,
};

use serde_json::Value;

/// How long a line may be in coming.
const LIMIT: Duration = Duration::from_secs(60);

/// The lines so far: JSON, one each, in the order written.
#[derive(Debug, Clone, Default)]
pub(crate) struct Log(Arc<(Mutex<Vec<Value>>, Condvar)>);

impl Log {
    /// Reads `from` until its end, and keeps a copy at `path` for whoever looks into a failure.
    pub(crate) fn reading(from: impl Read + Send + 'static, path: &Path) -> Self {
        let (log, mut copy) = (Self::default(), std::fs::File::create(path).unwrap());
        let grown = log.clone();
        thread::spawn(move || {
            for line in BufReader::new(from).split(b'\n').map_while(Result::ok) {
                let _ = copy.write_all(&line).and_then(|()| copy.write_all(b"\n"));
                let text = String::from_utf8_lossy(&line);
                let line = serde_json::from_str(&text).unwrap_or_else(|_| Value::String(text.into_owned()));
                let (lines, changed) = &*grown.0;
                lines.lock().unwrap().push(line);
                changed.notify_all();
            }
        });
        log
    }

    /// The fields of the first line with this message for which `is_it`, waiting for it.
    pub(crate) fn line(&self, message: &str, is_it: impl Fn(&Value) -> bool) -> Value {
        self.line_within(LIMIT, message, is_it)
    }

    /// The same, of something that takes long.
    pub(crate) fn line_within(&self, limit: Duration, message: &str, is_it: impl Fn(&Value) -> bool) -> Value {
        let find = |lines: &[Value]| {
            let mut fields = lines.iter().map(|line| &line["fields"]);
            fields.find(|fields| fields["message"] == message && is_it(fields)).cloned()
        };
        let (lines, changed) = &*self.0;
        let waited = changed.wait_timeout_while(lines.lock().unwrap(), limit, |lines| find(lines).is_none()).unwrap();
        find(&waited.0).unwrap_or_else(|| panic!("the log has no line {message:?} of this kind"))
    }

    /// How many lines so far have this message and are such.
    pub(crate) fn count(&self, message: &str, is_it: impl Fn(&Value) -> bool) -> usize {
        count(&self.0.0.lock().unwrap(), message, &is_it)
    }

    /// Waits until there are so many.
    pub(crate) fn counts(&self, so_many: usize, message: &str, is_it: impl Fn(&Value) -> bool) {
        let (lines, changed) = &*self.0;
        let fewer = |lines: &mut Vec<Value>| count(lines, message, &is_it) < so_many;
        let waited = changed.wait_timeout_while(lines.lock().unwrap(), LIMIT, fewer).unwrap();
        assert!(!waited.1.timed_out(), "the log has not {so_many} lines {message:?} of this kind");
    }

    /// What it says, for a failure's message.
    pub(crate) fn tail(&self) -> String {
        let lines = self.0.0.lock().unwrap();
        lines.iter().rev().take(10).rev().map(|line| format!("{line}\n")).collect()
    }
}

fn count(lines: &[Value], message: &str, is_it: &impl Fn(&Value) -> bool) -> usize {
    lines.iter().map(|line| &line["fields"]).filter(|fields| fields["message"] == message && is_it(fields)).count()
}
