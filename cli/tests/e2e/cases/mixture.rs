//! Work of all kinds on one server at once, until nobody answers any more.

use std::{io, sync::mpsc::Sender};

use serde_json::{Value, json};

use super::sandboxes::{create, identity};
use crate::{
    chance::Chance,
    http::{Answer, Api},
};

/// Most sandboxes that one worker has at a time.
const MOST: usize = 2;

/// A sandbox, and what its guest holds in RAM.
pub(super) struct Kept {
    pub(super) id: String,
    /// None before it has answered.
    value: Option<Value>,
    counter: u64,
}

impl Kept {
    pub(super) fn new(api: &Api) -> Self {
        let mut this = Self::called(create(api, &json!({})));
        this.answers(api);
        this
    }

    const fn called(id: String) -> Self {
        Self { id, value: None, counter: 0 }
    }

    /// It answers, and is the one that it was.
    pub(super) fn answers(&mut self, api: &Api) -> String {
        let (now, start) = identity(api, &self.id);
        self.is_still(&now);
        start
    }

    fn is_still(&mut self, now: &Value) {
        let counter = now["counter"].as_u64().unwrap();
        let same = *self.value.get_or_insert_with(|| now["value"].clone()) == now["value"];
        assert!(same && counter > self.counter, "{now}, behind {} calls", self.counter);
        self.counter = counter;
    }
}

/// Somebody at work on a server.
pub(super) struct Worker<'a> {
    pub(super) api: &'a Api,
    pub(super) chance: Chance,
    /// Is told of every step.
    pub(super) done: Sender<()>,
}

impl Worker<'_> {
    /// One step; an error once the server is killed.
    fn step(&self, method: &str, target: &str, body: &Value) -> io::Result<Answer> {
        let body = if method == "POST" { body.to_string() } else { String::new() };
        let answer = self.api.try_call(method, target, &[], body.as_bytes())?;
        // Whoever counts the steps may have seen enough.
        let _ = self.done.send(());
        Ok(answer)
    }

    /// Pauses and resumes a sandbox in all ways.
    pub(super) fn pause_and_resume(mut self, id: &str) {
        const VERBS: [(&str, &str, &str); 6] = [
            ("POST", "/v1/sandboxes/ID/pause", r#"{"to":"ram"}"#),
            ("POST", "/v1/sandboxes/ID/pause", r#"{"to":"disk"}"#),
            ("GET", "/sandbox/ID/", "null"),
            ("POST", "/v1/sandboxes/ID/resume", "{}"),
            ("POST", "/v1/sandboxes/ID/fork", r#"{"count":1}"#),
            ("POST", "/v1/sandboxes/ID/exec", r#"{"command":["true"]}"#),
        ];
        loop {
            let (method, target, body) = self.chance.pick(&VERBS);
            let body = serde_json::from_str(body).unwrap();
            let Ok(answer) = self.step(method, &target.replace("ID", id), &body) else { return };
            // Its children are somebody else, and nobody's here.
            let children = if target.ends_with("fork") { ids(&answer) } else { Vec::new() };
            for child in children {
                if self.step("DELETE", &format!("/v1/sandboxes/{child}"), &Value::Null).is_err() {
                    return;
                }
            }
        }
    }

    /// Invokes the template.
    pub(super) fn invoke(self) {
        while let Ok(answer) = self.step("GET", "/invoke/identity/", &Value::Null) {
            assert_eq!(answer.success()["counter"], 1, "a VM that somebody had before");
        }
    }

    /// Makes sandboxes, forks, pauses and kills them. Those that were there at the end are returned: all of which it was told, and that it
    /// had not told to end.
    pub(super) fn make_and_kill(mut self) -> Vec<Kept> {
        let mut mine = Vec::new();
        while self.one_more(&mut mine).is_ok() {}
        mine
    }

    fn one_more(&mut self, mine: &mut Vec<Kept>) -> io::Result<()> {
        while mine.len() >= MOST {
            let oldest = mine.remove(0);
            let killed = self.step("DELETE", &format!("/v1/sandboxes/{}", oldest.id), &Value::Null)?;
            assert_eq!(killed.status(), 204, "{}", killed.text());
        }
        let new = json!({ "template": "identity", "timeout": "1h", "idle": "0s", "hibernate_after": "0s" });
        let (target, body) = match mine.last() {
            Some(parent) if self.chance.below(2) == 0 => {
                (format!("/v1/sandboxes/{}/fork", parent.id), json!({ "count": 1 }))
            }
            _ => ("/v1/sandboxes".to_owned(), new),
        };
        let made = self.step("POST", &target, &body)?;
        // A parent that is paused has no children.
        assert!(made.status() == 201 || (made.status() == 409 && target.ends_with("fork")), "{}", made.text());
        mine.extend(ids(&made).into_iter().map(Kept::called));
        let Some(one) = mine.last_mut() else { return Ok(()) };
        let now = self.step("GET", &format!("/sandbox/{}/", one.id), &Value::Null)?;
        one.is_still(&now.success());
        if self.chance.below(2) == 0 {
            let to = self.chance.pick(&["ram", "disk"]);
            self.step("POST", &format!("/v1/sandboxes/{}/pause", one.id), &json!({ "to": to }))?;
        }
        Ok(())
    }
}

/// Of the sandboxes that were made, if any were.
fn ids(made: &Answer) -> Vec<String> {
    if made.status() != 201 {
        return Vec::new();
    }
    let made = made.json();
    let id = |info: &Value| info["id"].as_str().unwrap().to_owned();
    match made["sandboxes"].as_array() {
        Some(children) => children.iter().map(id).collect(),
        None => vec![id(&made)],
    }
}
