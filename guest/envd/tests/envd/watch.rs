//! Watches: told and asked.

use std::{
    fs::{self, OpenOptions, Permissions},
    io::Write,
    os::unix::fs::PermissionsExt,
    path::Path,
};

use hyper::StatusCode;
use serde_json::{Value, json};

use crate::rig::{Rig, Stream, within};

const OK: StatusCode = StatusCode::OK;

/// Name and kind of each event until the one of that name and kind.
async fn until(stream: &mut Stream, name: &str, kind: &str) -> Vec<(String, String)> {
    let mut events = Vec::new();
    loop {
        let (flags, message) = stream.next().await.unwrap();
        assert_eq!(flags, 0, "{message}");
        let event = &message["filesystem"];
        events.push(pair(event));
        if events.last().unwrap() == &(name.to_owned(), format!("EVENT_TYPE_{kind}")) {
            return events;
        }
    }
}

fn pair(event: &Value) -> (String, String) {
    (event["name"].as_str().unwrap().into(), event["type"].as_str().unwrap().into())
}

fn events(wanted: &[(&str, &str)]) -> Vec<(String, String)> {
    wanted.iter().map(|(name, kind)| ((*name).to_owned(), format!("EVENT_TYPE_{kind}"))).collect()
}

async fn watch(rig: &Rig, message: &Value) -> Stream {
    let mut stream = rig.stream("filesystem.Filesystem/WatchDir", message).await;
    assert_eq!(stream.next().await, Some((0, json!({"start": {}}))));
    stream
}

/// As an upload does it.
fn write(path: &Path) {
    let mut file = OpenOptions::new().create(true).truncate(true).write(true).open(path).unwrap();
    fs::set_permissions(path, Permissions::from_mode(0o600)).unwrap();
    file.write_all(b"x").unwrap();
}

#[tokio::test]
async fn a_folder_tells_what_happens_in_it() {
    let rig = Rig::new().await;
    fs::create_dir(rig.path("sub")).unwrap();
    let mut stream = watch(&rig, &json!({"path": rig.path("")})).await;
    write(&rig.path("a"));
    write(&rig.path("sub/unseen"));
    fs::rename(rig.path("a"), rig.path("b")).unwrap();
    fs::remove_file(rig.path("b")).unwrap();
    let wanted =
        events(&[("a", "CREATE"), ("a", "CHMOD"), ("a", "WRITE"), ("a", "RENAME"), ("b", "CREATE"), ("b", "REMOVE")]);
    assert_eq!(until(&mut stream, "b", "REMOVE").await, wanted);
}

#[tokio::test]
async fn folders_below_are_watched_where_asked_new_ones_too() {
    let rig = Rig::new().await;
    fs::create_dir(rig.path("old")).unwrap();
    fs::write(rig.path("old/before"), "").unwrap();
    let mut stream = watch(&rig, &json!({"path": rig.path(""), "recursive": true})).await;
    write(&rig.path("old/a"));
    assert_eq!(
        until(&mut stream, "old/a", "WRITE").await,
        events(&[("old/a", "CREATE"), ("old/a", "CHMOD"), ("old/a", "WRITE")])
    );
    // In there before the daemon can know of it.
    fs::create_dir_all(rig.path("new/deep")).unwrap();
    fs::write(rig.path("new/deep/file"), "").unwrap();
    let seen = until(&mut stream, "new/deep/file", "CREATE").await;
    assert_eq!(seen, events(&[("new", "CREATE"), ("new/deep", "CREATE"), ("new/deep/file", "CREATE")]));
    write(&rig.path("new/deep/later"));
    let wanted = events(&[("new/deep/later", "CREATE"), ("new/deep/later", "CHMOD"), ("new/deep/later", "WRITE")]);
    assert_eq!(until(&mut stream, "new/deep/later", "WRITE").await, wanted);
    // Known by its new name from now on.
    fs::rename(rig.path("new"), rig.path("moved")).unwrap();
    until(&mut stream, "moved", "CREATE").await;
    write(&rig.path("moved/deep/x"));
    until(&mut stream, "moved/deep/x", "WRITE").await;
    fs::remove_dir_all(rig.path("moved")).unwrap();
    let end = until(&mut stream, "moved", "REMOVE").await;
    assert_eq!(end.iter().filter(|event| event.1.ends_with("REMOVE")).count(), 5, "once each: {end:?}");
}

/// Editors and package managers write beside a file, and put it in its place.
#[tokio::test]
async fn a_file_that_takes_the_place_of_another_is_told_as_created() {
    let rig = Rig::new().await;
    fs::create_dir(rig.path("old")).unwrap();
    fs::write(rig.path("old/a"), "").unwrap();
    let mut stream = watch(&rig, &json!({"path": rig.path(""), "recursive": true})).await;
    fs::create_dir(rig.path("new")).unwrap();
    fs::write(rig.path("new/a"), "").unwrap();
    until(&mut stream, "new/a", "CREATE").await;
    for folder in ["old", "new"] {
        fs::write(rig.path("beside"), "").unwrap();
        until(&mut stream, "beside", "CREATE").await;
        fs::rename(rig.path("beside"), rig.path(folder).join("a")).unwrap();
        until(&mut stream, &format!("{folder}/a"), "CREATE").await;
    }
}

#[tokio::test]
async fn an_event_may_bring_its_entry() {
    let rig = Rig::new().await;
    let mut stream = watch(&rig, &json!({"path": rig.path(""), "includeEntry": true})).await;
    fs::create_dir(rig.path("a")).unwrap();
    let (_, message) = stream.next().await.unwrap();
    assert_eq!(message["filesystem"]["entry"]["type"], "FILE_TYPE_DIRECTORY");
    assert_eq!(message["filesystem"]["entry"]["path"], json!(rig.path("a")));
    fs::remove_dir(rig.path("a")).unwrap();
    assert_eq!(stream.next().await, Some((0, json!({"filesystem": {"name": "a", "type": "EVENT_TYPE_REMOVE"}}))));
}

#[tokio::test]
async fn a_watcher_is_asked() {
    let rig = Rig::new().await;
    let (status, answer) =
        rig.call("filesystem.Filesystem/CreateWatcher", &json!({"path": rig.path(""), "recursive": true})).await;
    assert_eq!(status, OK);
    let id = json!({"watcherId": answer["watcherId"]});
    assert!(answer["watcherId"].as_str().unwrap().starts_with('w'));
    assert_eq!(rig.call("filesystem.Filesystem/GetWatcherEvents", &id).await, (OK, json!({"events": []})));
    write(&rig.path("a"));
    // Asked at once: nothing that has happened is missing.
    let (_, answer) = rig.call("filesystem.Filesystem/GetWatcherEvents", &id).await;
    let happened: Vec<_> = answer["events"].as_array().unwrap().iter().map(pair).collect();
    assert_eq!(happened, events(&[("a", "CREATE"), ("a", "CHMOD"), ("a", "WRITE")]));
    assert_eq!(rig.call("filesystem.Filesystem/GetWatcherEvents", &id).await, (OK, json!({"events": []})));
    assert_eq!(rig.call("filesystem.Filesystem/RemoveWatcher", &id).await, (OK, json!({})));
    let gone = json!({"code": "not_found", "message": format!("watcher with id {} not found", id["watcherId"].as_str().unwrap())});
    for method in ["GetWatcherEvents", "RemoveWatcher"] {
        let answer = rig.call(&format!("filesystem.Filesystem/{method}"), &id).await;
        assert_eq!(answer, (StatusCode::NOT_FOUND, gone.clone()));
    }
}

/// More than the kernel keeps for who does not read: the daemon reads for it, between the writes.
#[tokio::test]
async fn a_watcher_that_is_not_asked_for_long_keeps_what_happened() {
    let rig = Rig::new().await;
    let (_, answer) = rig.call("filesystem.Filesystem/CreateWatcher", &json!({"path": rig.path("")})).await;
    let id = json!({"watcherId": answer["watcherId"]});
    let file = fs::File::create(rig.path("a")).unwrap();
    for number in 0..20_000u32 {
        file.set_permissions(Permissions::from_mode(0o600 | (number & 1))).unwrap();
        fs::write(rig.path("b"), "").unwrap();
        fs::remove_file(rig.path("b")).unwrap();
        if number % 1000 == 0 {
            within("the daemon's turn", rig.call("process.Process/List", &json!({}))).await;
        }
    }
    let (status, answer) = rig.call("filesystem.Filesystem/GetWatcherEvents", &id).await;
    assert_eq!((status, answer["events"].as_array().unwrap().len()), (OK, 60_001));
}

#[tokio::test]
async fn what_cannot_be_watched_is_refused() {
    let rig = Rig::new().await;
    fs::write(rig.path("file"), "").unwrap();
    for (path, status, code, message) in [
        (
            rig.path("file"),
            StatusCode::BAD_REQUEST,
            "invalid_argument",
            format!("path {} not a directory", rig.path("file").display()),
        ),
        (
            "/nowhere".into(),
            StatusCode::NOT_FOUND,
            "not_found",
            "path /nowhere not found: No such file or directory (os error 2)".into(),
        ),
    ] {
        let error = json!({"code": code, "message": message});
        let answer = rig.call("filesystem.Filesystem/CreateWatcher", &json!({"path": path})).await;
        assert_eq!(answer, (status, error.clone()));
        let mut stream = rig.stream("filesystem.Filesystem/WatchDir", &json!({"path": path})).await;
        assert_eq!(stream.next().await, Some((2, json!({"error": error}))));
    }
}
