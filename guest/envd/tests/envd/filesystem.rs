//! Stat, list, make, move, remove.

use std::{fs, os::unix::fs::symlink, path::Path};

use hyper::StatusCode;
use serde_json::{Value, json};

use crate::rig::Rig;

const OK: StatusCode = StatusCode::OK;

async fn call(rig: &Rig, method: &str, message: Value) -> (StatusCode, Value) {
    rig.call(&format!("filesystem.Filesystem/{method}"), &message).await
}

fn error(status: StatusCode, code: &str, message: String) -> (StatusCode, Value) {
    (status, json!({"code": code, "message": message}))
}

#[tokio::test]
async fn an_entry_says_what_a_file_is() {
    let rig = Rig::new().await;
    let file = rig.path("file.txt");
    fs::write(&file, "hello").unwrap();
    fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o640)).unwrap();
    std::os::unix::fs::chown(&file, Some(rig.uid), None).unwrap();
    fs::File::open(&file)
        .unwrap()
        .set_modified(std::time::SystemTime::UNIX_EPOCH + std::time::Duration::new(1_700_000_000, 5))
        .unwrap();
    let (status, answer) = call(&rig, "Stat", json!({"path": "file.txt"})).await;
    let entry = &answer["entry"];
    assert_eq!(status, OK);
    for (field, wanted) in [
        ("name", json!("file.txt")),
        ("type", json!("FILE_TYPE_FILE")),
        ("path", json!(file)),
        ("size", json!("5")),
        ("mode", json!(0o640)),
        ("permissions", json!("-rw-r-----")),
        ("owner", json!("user")),
        ("modifiedTime", json!("2023-11-14T22:13:20.000000005Z")),
        ("symlinkTarget", Value::Null),
        ("isSymlink", Value::Null),
        ("metadata", Value::Null),
    ] {
        assert_eq!(entry[field], wanted, "{field}");
    }
}

/// With the type of what it leads to.
#[tokio::test]
async fn links_are_told_with_their_absolute_targets() {
    let rig = Rig::new().await;
    fs::create_dir(rig.path("folder")).unwrap();
    symlink("folder", rig.path("link")).unwrap();
    symlink("nowhere", rig.path("broken")).unwrap();
    let (_, answer) = call(&rig, "Stat", json!({"path": rig.path("link")})).await;
    let entry = &answer["entry"];
    assert_eq!((&entry["type"], &entry["isSymlink"]), (&json!("FILE_TYPE_DIRECTORY"), &json!(true)));
    assert_eq!(entry["symlinkTarget"], json!(rig.path("folder").canonicalize().unwrap()));
    assert!(entry["permissions"].as_str().unwrap().starts_with('L'));
    let (status, answer) = call(&rig, "Stat", json!({"path": rig.path("broken")})).await;
    assert_eq!((status, &answer["entry"]["type"]), (OK, &json!("FILE_TYPE_UNSPECIFIED")));
    assert_eq!(answer["entry"]["symlinkTarget"], json!(rig.path("broken")));
}

#[tokio::test]
async fn a_folder_is_listed_as_deep_as_asked() {
    let rig = Rig::new().await;
    fs::create_dir_all(rig.path("a/b/c")).unwrap();
    fs::write(rig.path("a/b/c/d"), "").unwrap();
    fs::write(rig.path("a/z"), "").unwrap();
    symlink("/", rig.path("a/link")).unwrap();
    symlink("a", rig.path("alias")).unwrap();
    for (path, depth, wanted) in [
        ("a", json!(0), &["a/b", "a/link", "a/z"][..]),
        ("a", json!(1), &["a/b", "a/link", "a/z"]),
        ("a", json!("2"), &["a/b", "a/b/c", "a/link", "a/z"]),
        ("a", json!(4_294_967_295u32), &["a/b", "a/b/c", "a/b/c/d", "a/link", "a/z"]),
        ("alias", json!(1), &["alias/b", "alias/link", "alias/z"]),
    ] {
        let (status, answer) = call(&rig, "ListDir", json!({"path": path, "depth": depth})).await;
        let paths: Vec<&Value> = answer["entries"].as_array().unwrap().iter().map(|entry| &entry["path"]).collect();
        let wanted: Vec<Value> = wanted.iter().map(|path| json!(rig.path(path))).collect();
        assert_eq!((status, paths), (OK, wanted.iter().collect()), "{path} {depth}");
    }
}

#[tokio::test]
async fn folders_are_made_with_those_above_and_are_the_users() {
    let rig = Rig::new().await;
    let (status, answer) = call(&rig, "MakeDir", json!({"path": "a/b"})).await;
    assert_eq!((status, &answer["entry"]["path"]), (OK, &json!(rig.path("a/b"))));
    for path in ["a", "a/b"] {
        let metadata = fs::metadata(rig.path(path)).unwrap();
        assert_eq!(std::os::unix::fs::MetadataExt::uid(&metadata), rig.uid);
        assert_eq!(std::os::unix::fs::MetadataExt::mode(&metadata) & 0o7777, 0o755);
    }
    let exists = format!("directory already exists: {}", rig.path("a").display());
    assert_eq!(
        call(&rig, "MakeDir", json!({"path": "a"})).await,
        error(StatusCode::CONFLICT, "already_exists", exists)
    );
    fs::write(rig.path("file"), "").unwrap();
    let file = format!("path already exists but it is not a directory: {}", rig.path("file").display());
    assert_eq!(
        call(&rig, "MakeDir", json!({"path": "file"})).await,
        error(StatusCode::BAD_REQUEST, "invalid_argument", file)
    );
    let (status, answer) = call(&rig, "MakeDir", json!({"path": "file/below"})).await;
    assert_eq!((status, &answer["code"]), (StatusCode::BAD_REQUEST, &json!("invalid_argument")));
}

#[tokio::test]
async fn files_move_and_go() {
    let rig = Rig::new().await;
    fs::write(rig.path("from"), "x").unwrap();
    let (status, answer) = call(&rig, "Move", json!({"source": "from", "destination": "new/to"})).await;
    assert_eq!((status, &answer["entry"]["path"]), (OK, &json!(rig.path("new/to"))));
    assert_eq!(fs::read(rig.path("new/to")).unwrap(), b"x");
    let missing = error(
        StatusCode::NOT_FOUND,
        "not_found",
        "source file not found: No such file or directory (os error 2)".into(),
    );
    assert_eq!(call(&rig, "Move", json!({"source": "from", "destination": "other/to"})).await, missing);
    assert!(!rig.path("other").exists(), "nothing is made for a move that fails");
    symlink("new", rig.path("link")).unwrap();
    for path in ["link", "new", "new", "never"] {
        assert_eq!(call(&rig, "Remove", json!({"path": path})).await, (OK, json!({})), "{path}");
        assert!(fs::symlink_metadata(rig.path(path)).is_err());
    }
}

#[tokio::test]
async fn what_is_not_there_is_not_found() {
    let rig = Rig::new().await;
    for (method, text) in [("Stat", "file not found"), ("ListDir", "path not found")] {
        let message = format!("{text}: No such file or directory (os error 2)");
        assert_eq!(
            call(&rig, method, json!({"path": "/nowhere"})).await,
            error(StatusCode::NOT_FOUND, "not_found", message)
        );
    }
    fs::write(rig.path("file"), "").unwrap();
    let message = format!("path is not a directory: {}", rig.path("file").canonicalize().unwrap().display());
    assert_eq!(
        call(&rig, "ListDir", json!({"path": "file"})).await,
        error(StatusCode::BAD_REQUEST, "invalid_argument", message)
    );
    symlink("loop", rig.path("loop")).unwrap();
    assert_eq!(call(&rig, "ListDir", json!({"path": "loop"})).await.0, StatusCode::BAD_REQUEST);
    for (path, message) in [
        ("~root/x", "failed to expand path '~root/x' for user 'user': cannot expand user-specific home dir"),
        ("a\0b", "the path contains a zero byte"),
    ] {
        let refused = error(StatusCode::BAD_REQUEST, "invalid_argument", message.into());
        for method in ["Stat", "ListDir", "MakeDir", "Remove", "CreateWatcher"] {
            assert_eq!(call(&rig, method, json!({"path": path})).await, refused, "{method}");
        }
        assert_eq!(call(&rig, "Move", json!({"source": path, "destination": path})).await, refused);
    }
    let (status, answer) =
        rig.call_as("filesystem.Filesystem/Stat", &json!({"path": "/"}), &[("authorization", "Basic eDo=")]).await;
    assert_eq!((status, answer), error(StatusCode::UNAUTHORIZED, "unauthenticated", "invalid username: 'x'".into()));
    let (status, answer) = call(&rig, "Stat", json!({"path": ["x"]})).await;
    assert_eq!((status, &answer["code"]), (StatusCode::BAD_REQUEST, &json!("invalid_argument")));
}

/// The sandbox is its tenant's: what leads out of the home leads there.
#[tokio::test]
async fn dots_lead_where_the_system_leads() {
    let rig = Rig::new().await;
    let (status, answer) = call(&rig, "Stat", json!({"path": "../../../../../../../../etc/passwd"})).await;
    assert_eq!((status, &answer["entry"]["path"]), (OK, &json!(Path::new("/etc/passwd"))));
}
