//! Uploads, downloads, signed addresses, composing.

use std::{
    fs,
    io::{Read, Write},
    os::unix::fs::MetadataExt,
    process::Command,
};

use bytes::Bytes;
use flate2::{Compression, read::GzDecoder, write::GzEncoder};
use http_body_util::{BodyExt, Full};
use hyper::{Request, Response, StatusCode, body::Incoming};
use serde_json::{Value, json};

use crate::rig::{Rig, request, within};

const OK: StatusCode = StatusCode::OK;
const OCTETS: &str = "application/octet-stream";

fn get(uri: &str, headers: &[(&str, &str)]) -> Request<Full<Bytes>> {
    let mut request = Request::get(uri).header("host", "s");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(Full::default()).unwrap()
}

async fn body(response: Response<Incoming>) -> Bytes {
    within("the body", response.into_body().collect()).await.unwrap().to_bytes()
}

async fn post(
    rig: &Rig,
    uri: &str,
    content_type: &str,
    headers: &[(&str, &str)],
    bytes: impl Into<Bytes>,
) -> (StatusCode, Value) {
    let (status, body) = rig.answer(request(uri, content_type, headers, bytes)).await;
    (status, serde_json::from_slice(&body).unwrap_or_else(|_| panic!("{uri}: {status} {body:?}")))
}

fn form(parts: &[(&str, &str, &str)]) -> (String, String) {
    let mut text = String::new();
    for (name, filename, content) in parts {
        let disposition = format!("form-data; name=\"{name}\"; filename=\"{filename}\"");
        text += &format!("--b0\r\nContent-Disposition: {disposition}\r\nContent-Type: text/plain\r\n\r\n{content}\r\n");
    }
    ("multipart/form-data; boundary=b0".into(), text + "--b0--\r\n")
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn refused(status: u16, message: &str) -> (StatusCode, Value) {
    (StatusCode::from_u16(status).unwrap(), json!({"code": status, "message": message}))
}

/// More than a piece.
fn much() -> Vec<u8> {
    (0..3_000_001u32).map(|number| u8::try_from(number % 251).unwrap()).collect()
}

#[tokio::test]
async fn a_file_goes_up_and_down_in_every_way() {
    let rig = Rig::new().await;
    let much = much();
    for bytes in [&b""[..], b"hello\n", &much] {
        let uri = "files?path=new%2Fa%20b.bin";
        let path = rig.path("new/a b.bin");
        let written = (OK, json!([{"path": path, "name": "a b.bin", "type": "file"}]));
        assert_eq!(post(&rig, uri, OCTETS, &[], bytes.to_vec()).await, written);
        assert_eq!(fs::read(&path).unwrap(), bytes);
        let packed = gzip(bytes);
        fs::write(&path, "something else that is longer than what comes").unwrap();
        assert_eq!(post(&rig, uri, OCTETS, &[("content-encoding", "gzip")], packed).await, written);
        assert_eq!(fs::read(&path).unwrap(), bytes);

        let plain = rig.send(get(&format!("/{uri}"), &[("accept-encoding", "gzip, deflate")])).await;
        assert_eq!(
            (plain.status(), plain.headers()["content-length"].to_str().unwrap()),
            (OK, bytes.len().to_string().as_str())
        );
        assert_eq!(plain.headers()["vary"], "Accept-Encoding");
        assert_eq!(plain.headers()["content-disposition"], "inline; filename=\"a b.bin\"");
        assert!(!plain.headers().contains_key("content-encoding"));
        assert_eq!(body(plain).await, bytes);
        let packed = rig.send(get(&format!("/{uri}"), &[("accept-encoding", "gzip")])).await;
        assert_eq!(packed.headers()["content-encoding"], "gzip");
        let mut unpacked = Vec::new();
        GzDecoder::new(&body(packed).await[..]).read_to_end(&mut unpacked).unwrap();
        assert_eq!(unpacked, bytes);
    }
}

#[tokio::test]
async fn what_is_written_is_the_users_with_its_folders() {
    let rig = Rig::new().await;
    post(&rig, "files?path=~/x/y/z", OCTETS, &[], "1").await;
    for (path, mode) in [("x", 0o40755), ("x/y", 0o40755), ("x/y/z", 0o100_644)] {
        let metadata = fs::metadata(rig.path(path)).unwrap();
        assert_eq!((metadata.uid(), metadata.mode()), (rig.uid, mode), "{path}");
    }
    if rig.uid == 1000 {
        post(&rig, "files?path=%2Ftmp%2F..&username=root", OCTETS, &[], "1").await;
        let path = rig.path("x/y/z");
        post(&rig, &format!("files?username=root&path={}", path.display()), OCTETS, &[], "2").await;
        assert_eq!((fs::metadata(&path).unwrap().uid(), fs::read(&path).unwrap()), (0, b"2".to_vec()));
    }
}

#[tokio::test]
async fn a_form_brings_one_file_or_many() {
    let rig = Rig::new().await;
    let (kind, text) = form(&[("file", "/ignored", "one")]);
    let answer = post(&rig, "files?path=a.txt", &kind, &[], text).await;
    assert_eq!(answer, (OK, json!([{"path": rig.path("a.txt"), "name": "a.txt", "type": "file"}])));
    assert_eq!(fs::read(rig.path("a.txt")).unwrap(), b"one");

    let second = rig.path("deep/b.txt");
    let large = "x".repeat(1_000_000);
    let (kind, text) =
        form(&[("file", "c.txt", &large), ("other", "no", "no"), ("file", second.to_str().unwrap(), "two")]);
    for (headers, bytes) in
        [(&[][..], text.clone().into_bytes()), (&[("content-encoding", "gzip")], gzip(text.as_bytes()))]
    {
        let answer = post(&rig, "files", &kind, headers, bytes).await;
        let wanted = json!([{"path": rig.path("c.txt"), "name": "c.txt", "type": "file"}, {"path": second, "name": "b.txt", "type": "file"}]);
        assert_eq!(answer, (OK, wanted));
        assert_eq!(
            (fs::read(rig.path("c.txt")).unwrap().len(), fs::read(&second).unwrap()),
            (1_000_000, b"two".to_vec())
        );
        assert!(!rig.path("no").exists());
    }
}

#[tokio::test]
async fn parts_of_a_file_are_sent_as_asked() {
    let rig = Rig::new().await;
    let much = much();
    fs::write(rig.path("a"), &much).unwrap();
    let size = much.len();
    for (range, start, end) in [
        ("bytes=0-9", 0, 10),
        ("bytes=5-", 5, size),
        ("bytes=262144-300000", 262_144, 300_001),
        ("bytes=2000000-2000000", 2_000_000, 2_000_001),
        ("bytes=-7", size - 7, size),
        ("bytes=262000-600000", 262_000, 600_001),
    ] {
        let response = rig.send(get("/files?path=a", &[("range", range), ("accept-encoding", "gzip")])).await;
        assert_eq!(response.status(), StatusCode::PARTIAL_CONTENT, "{range}");
        assert_eq!(response.headers()["content-range"], format!("bytes {start}-{}/{size}", end - 1));
        assert_eq!(body(response).await, much[start..end], "{range}");
    }
    let response = rig.send(get("/files?path=a", &[("range", "bytes=3000001-")])).await;
    assert_eq!(
        (response.status().as_u16(), response.headers()["content-range"].to_str().unwrap()),
        (416, "bytes */3000001")
    );
    assert_eq!(body(response).await, r#"{"code":416,"message":"invalid range: failed to overlap"}"#);
    // Only while the file is still the same.
    let response = rig.send(get("/files?path=a", &[])).await;
    let modified = response.headers()["last-modified"].to_str().unwrap().to_owned();
    let other = "Thu, 01 Jan 1970 00:00:00 GMT";
    for (date, status) in [(modified.as_str(), 206), (other, 200)] {
        assert_eq!(
            rig.send(get("/files?path=a", &[("range", "bytes=0-1"), ("if-range", date)])).await.status().as_u16(),
            status
        );
    }
    for (date, status) in [(modified.as_str(), 304), (other, 200)] {
        assert_eq!(rig.send(get("/files?path=a", &[("if-modified-since", date)])).await.status().as_u16(), status);
    }
}

/// They say that they are empty, or a page long.
#[tokio::test]
async fn files_of_the_kernel_are_read_to_their_end() {
    let rig = Rig::new().await;
    for path in ["/proc/sys/kernel/random/boot_id", "/proc/cpuinfo", "/sys/kernel/mm/transparent_hugepage/enabled"] {
        let Ok(content) = fs::read(path) else { continue };
        for accept in ["gzip, deflate", "identity"] {
            let (status, body) = rig.answer(get(&format!("/files?path={path}"), &[("accept-encoding", accept)])).await;
            // Clocks in it go on.
            assert_eq!((status, body.len() / 64), (OK, content.len() / 64), "{path}");
        }
    }
    let boot = fs::read("/proc/sys/kernel/random/boot_id").unwrap();
    assert_eq!(rig.answer(get("/files?path=/proc/sys/kernel/random/boot_id", &[])).await.1, boot);
}

/// None is left where another write brings none.
#[tokio::test]
async fn notes_of_a_file_are_kept_until_the_next_write() {
    let rig = Rig::new().await;
    let uri = "files?path=a";
    let (status, answer) = post(&rig, uri, OCTETS, &[("x-metadata-Key", "v 1"), ("x-metadata-b", "2")], "x").await;
    assert_eq!((status, &answer[0]["metadata"]), (OK, &json!({"key": "v 1", "b": "2"})), "{answer}");
    let stat =
        async || rig.call("filesystem.Filesystem/Stat", &json!({"path": "a"})).await.1["entry"]["metadata"].take();
    assert_eq!(stat().await, json!({"key": "v 1", "b": "2"}));
    post(&rig, uri, OCTETS, &[("x-metadata-b", "3")], "x").await;
    assert_eq!(stat().await, json!({"b": "3"}));
    post(&rig, uri, OCTETS, &[], "x").await;
    assert_eq!(stat().await, Value::Null);
    let long = format!("x-metadata-{}", "k".repeat(247));
    for (name, value, message) in [
        ("x-metadata-a", "v".repeat(4096), "metadata has more than 4096 bytes"),
        (&long, "v".into(), "a metadata key has 1 to 246 bytes"),
        ("x-metadata-", "v".into(), "a metadata key has 1 to 246 bytes"),
    ] {
        assert_eq!(post(&rig, uri, OCTETS, &[(name, &value)], "x").await, refused(400, message));
    }
}

/// As the SDKs' tests have it: each once.
#[tokio::test]
async fn a_watch_sees_an_upload_as_created_changed_and_written() {
    let rig = Rig::new().await;
    let (_, watcher) = rig.call("filesystem.Filesystem/CreateWatcher", &json!({"path": rig.path("")})).await;
    let (kind, text) = form(&[("file", "a.txt", "hello")]);
    assert_eq!(post(&rig, "files", &kind, &[], text).await.0, OK);
    let (_, answer) = rig.call("filesystem.Filesystem/GetWatcherEvents", &watcher).await;
    let kinds: Vec<&Value> = answer["events"].as_array().unwrap().iter().map(|event| &event["type"]).collect();
    assert_eq!(kinds, ["EVENT_TYPE_CREATE", "EVENT_TYPE_CHMOD", "EVENT_TYPE_WRITE"]);
}

#[tokio::test]
async fn a_signed_address_is_as_good_as_the_token() {
    let rig = Rig::new().await;
    fs::write(rig.path("hello.txt"), "hello").unwrap();
    rig.answer(request("init", "application/json", &[], r#"{"accessToken":"0tQG31xiMp0IOQfaz9dcwi72L1CPo8e0"}"#)).await;
    let signed = "/files?path=hello.txt&username=user&signature=v1_gUtH%2Fs9YCJWgCizjfUxuWfhFE4QSydOWEIIvfLwDr6E";
    assert_eq!(rig.answer(get(signed, &[])).await, (OK, Bytes::from_static(b"hello")));
    let token = ("x-access-token", "0tQG31xiMp0IOQfaz9dcwi72L1CPo8e0");
    assert_eq!(rig.answer(get("/files?path=hello.txt", &[token])).await.0, OK);
    for (uri, headers, message) in [
        ("/files?path=hello.txt", &[][..], "missing signature query parameter"),
        ("/files?path=hello.txt&username=user&signature=v1_x", &[], "invalid signature"),
        (
            "/files?path=other.txt&username=user&signature=v1_gUtH%2Fs9YCJWgCizjfUxuWfhFE4QSydOWEIIvfLwDr6E",
            &[],
            "invalid signature",
        ),
        (signed, &[("x-access-token", "wrong")], "access token present in header but does not match"),
    ] {
        let (status, body) = rig.answer(get(uri, headers)).await;
        assert_eq!((status, serde_json::from_slice::<Value>(&body).unwrap()), refused(401, message), "{uri}");
    }
    // A signature for reading writes nothing.
    assert_eq!(post(&rig, &signed[1..], OCTETS, &[], "x").await, refused(401, "invalid signature"));
    // sha256("hello.txt:read::TOKEN:1"), without a user.
    let expired =
        "/files?path=hello.txt&signature=v1_1Yc7n4K6hJT7nAXUkX4ZwbaymlDmqDnW6HS6xs4BqQM&signature_expiration=1";
    let (status, body) = rig.answer(get(expired, &[])).await;
    assert_eq!((status, serde_json::from_slice::<Value>(&body).unwrap()), refused(401, "signature is already expired"));
    // Composing takes the token.
    let (status, _) = rig.answer(request("files/compose", "application/json", &[], "{}")).await;
    assert_eq!(status, StatusCode::UNAUTHORIZED);
}

#[tokio::test]
async fn several_files_become_one() {
    let rig = Rig::new().await;
    for (name, content) in [("1", "one "), ("2", "two "), ("3", "three")] {
        fs::write(rig.path(name), content).unwrap();
    }
    let compose =
        async |message: Value| post(&rig, "files/compose", "application/json", &[], message.to_string()).await;
    let answer = compose(json!({"source_paths": ["1", "2", rig.path("3")], "destination": "sub/all"})).await;
    assert_eq!(answer, (OK, json!({"path": rig.path("sub/all"), "name": "all", "type": "file"})));
    assert_eq!(fs::read(rig.path("sub/all")).unwrap(), b"one two three");
    assert_eq!(fs::metadata(rig.path("sub/all")).unwrap().uid(), rig.uid);
    assert_eq!(fs::read_dir(rig.path("")).unwrap().count(), 1, "the parts are gone");
    fs::write(rig.path("1"), "").unwrap();
    for (message, status, text) in [
        (json!({}), 400, "source_paths must not be empty".to_owned()),
        (json!({"source_paths": ["1"]}), 400, "destination is required".into()),
        (
            json!({"source_paths": ["1"], "destination": "1"}),
            400,
            "source path \"1\" cannot be the same as destination".into(),
        ),
        (
            json!({"source_paths": ["no"], "destination": "x"}),
            404,
            format!("source file not found: {}", rig.path("no").display()),
        ),
        (
            json!({"source_paths": ["sub"], "destination": "x"}),
            400,
            format!("source path is not a regular file: {}", rig.path("sub").display()),
        ),
        (
            json!({"source_paths": ["1"], "destination": "sub"}),
            400,
            format!("path is a directory: {}", rig.path("sub").display()),
        ),
        (
            json!({"source_paths": ["1"], "destination": "x", "username": "ghost"}),
            401,
            "error looking up user 'ghost': user: unknown user ghost".into(),
        ),
        (
            json!({"source_paths": 7}),
            400,
            "invalid request body: invalid type: integer `7`, expected a sequence at line 1 column 17".into(),
        ),
    ] {
        assert_eq!(compose(message).await, refused(status, &text));
    }
}

#[tokio::test]
async fn requests_that_are_wrong_are_refused() {
    let rig = Rig::new().await;
    fs::create_dir(rig.path("folder")).unwrap();
    Command::new("mkfifo").arg(rig.path("pipe")).status().unwrap();
    let at = |name: &str| rig.path(name).display().to_string();
    for (uri, status, message) in [
        ("/files?path=no", 404, format!("path '{}' does not exist", at("no"))),
        ("/files?path=folder", 400, format!("path '{}' is a directory", at("folder"))),
        ("/files", 400, format!("path '{}' is a directory", at("").trim_end_matches('/'))),
        ("/files?path=pipe", 400, format!("path '{}' is not a regular file", at("pipe"))),
        ("/files?path=a%00b", 400, "error resolving path: the path contains a zero byte".into()),
        ("/files?path=%FF", 400, "invalid path: not UTF-8".into()),
        ("/files?path=x&username=ghost", 401, "error looking up user 'ghost': user: unknown user ghost".into()),
        ("/files?path=~root/x", 400, "error resolving path: failed to expand path '~root/x' for user 'user': cannot expand user-specific home dir".into()),
        ("/files?path=x&signature_expiration=y", 400, "invalid signature_expiration: expected a number".into()),
    ] {
        let (answered, body) = rig.answer(get(uri, &[])).await;
        assert_eq!((answered, serde_json::from_slice::<Value>(&body).unwrap()), refused(status, &message), "{uri}");
    }
    fs::write(rig.path("a"), "a").unwrap();
    let (status, body) = rig.answer(get("/files?path=a", &[("accept-encoding", "identity;q=0, br")])).await;
    assert_eq!(
        (status, serde_json::from_slice::<Value>(&body).unwrap()),
        refused(406, "no acceptable encoding found, supported: identity, gzip")
    );

    let (kind, twice) = form(&[("file", "same", "1"), ("file", "same", "2")]);
    let (_, nameless) = form(&[("file", "", "1")]);
    let same = format!(
        "you cannot upload multiple files to the same path '{}' in one upload request, only the first specified file was uploaded",
        at("same")
    );
    for (uri, kind, headers, bytes, message) in [
        ("files", OCTETS, &[][..], "x", "path query parameter is required for raw body upload".to_owned()),
        ("files?path=folder", OCTETS, &[], "x", format!("path is a directory: {}", at("folder"))),
        ("files?path=pipe", OCTETS, &[], "x", format!("path is not a regular file: {}", at("pipe"))),
        ("files?path=a%2Fb", OCTETS, &[], "x", format!("error writing file: path is a file: {}", at("a"))),
        (
            "files?path=b",
            "text/plain",
            &[],
            "x",
            "unsupported content type: text/plain, expected multipart/form-data or application/octet-stream".into(),
        ),
        (
            "files?path=b",
            OCTETS,
            &[("content-encoding", "br")],
            "x",
            "unsupported Content-Encoding: br, supported: [gzip]".into(),
        ),
        (
            "files?path=b",
            OCTETS,
            &[("content-encoding", "gzip")],
            "not gzip at all",
            "error reading request body: invalid gzip header".into(),
        ),
        (
            "files?path=b",
            OCTETS,
            &[("content-encoding", "gzip")],
            "",
            "error reading request body: failed to create gzip reader: no data".into(),
        ),
        (
            "files",
            "multipart/form-data",
            &[],
            "x",
            "error parsing multipart form: multipart boundary not found in Content-Type".into(),
        ),
        ("files", &kind, &[], "--b0\r\nhalf", "error reading form: incomplete multipart stream".into()),
        ("files", &kind, &[], &twice, same),
        ("files", &kind, &[], &nameless, "a file of the form has no path: give it a filename".into()),
    ] {
        assert_eq!(post(&rig, uri, kind, headers, bytes.to_owned()).await, refused(400, &message), "{uri} {kind}");
    }
    let cut = &gzip(&much())[..1000];
    assert_eq!(
        post(&rig, "files?path=b", OCTETS, &[("content-encoding", "gzip")], cut.to_vec()).await.0,
        StatusCode::BAD_REQUEST
    );
    let request = Request::put("/files?path=b").header("host", "s").body(Full::default()).unwrap();
    let (status, body) = rig.answer(request).await;
    assert_eq!(
        (status, serde_json::from_slice::<Value>(&body).unwrap()),
        refused(405, "PUT is not a method of /files")
    );
}

/// A file system of 64 KiB.
#[tokio::test]
async fn a_full_disk_is_told() {
    let rig = Rig::new().await;
    let small = rig.path("small");
    fs::create_dir(&small).unwrap();
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=64k,mode=777", "tmpfs"]).arg(&small).status();
    if !mounted.is_ok_and(|status| status.success()) {
        eprintln!("skipped: no file system can be mounted here");
        return;
    }
    let answer = post(&rig, "files?path=small/a", OCTETS, &[], vec![1; 100_000]).await;
    fs::write(rig.path("part"), vec![1; 100_000]).unwrap();
    let composed =
        post(&rig, "files/compose", "application/json", &[], r#"{"source_paths":["part"],"destination":"small/b"}"#)
            .await;
    let left = fs::read_dir(&small).unwrap().count();
    assert!(Command::new("umount").arg(&small).status().unwrap().success());
    assert_eq!(answer, refused(507, "attempted to write 100000 bytes: not enough disk space available"));
    assert_eq!(composed, refused(507, "not enough disk space available"));
    assert_eq!((left, rig.path("part").exists()), (1, true), "what failed left nothing beside, and the parts");
}
