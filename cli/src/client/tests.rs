//! The verbs against a gateway that says what it is told to.

use std::{
    io::{self, Write},
    sync::{Arc, Mutex},
};

use clap::Parser as _;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
};

use super::{
    ApiArgs, InvokeCommand, Outcome, PoolCommand, SandboxCommand, TemplateCommand, Terminal, invoke, pool, sandbox,
    template,
};

#[derive(clap::Parser)]
struct Line {
    #[command(flatten)]
    api: ApiArgs,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(clap::Subcommand)]
enum Verb {
    #[command(subcommand)]
    Template(TemplateCommand),
    #[command(subcommand)]
    Pool(PoolCommand),
    Invoke(InvokeCommand),
    #[command(subcommand)]
    Sandbox(SandboxCommand),
}

#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Vec<u8>>>);

impl Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Shared {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

struct Ran {
    end: Result<Outcome, String>,
    out: String,
    err: String,
    /// What the gateway got.
    request: String,
}

/// Runs `stasis WORDS` against a gateway that gives this answer and closes once the request has ended so.
async fn run(words: &[&str], request_ends: &str, answer: &str) -> Ran {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (answer, request_ends) = (answer.to_owned(), request_ends.as_bytes().to_owned());
    let gateway = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut request = Vec::new();
        while !request.ends_with(&request_ends) && stream.read_buf(&mut request).await.unwrap() > 0 {}
        stream.write_all(answer.as_bytes()).await.unwrap();
        String::from_utf8_lossy(&request).into_owned()
    });
    let line = Line::try_parse_from([&["stasis", "--api", &url], words].concat()).unwrap();
    let (out, err) = (Shared::default(), Shared::default());
    let mut terminal = Terminal { out: Box::new(out.clone()), err: Box::new(err.clone()) };
    let end = match line.verb {
        Verb::Template(command) => template::run(&line.api.access(), command, &mut terminal).await,
        Verb::Invoke(command) => invoke::run(&line.api.access(), command, &mut terminal).await,
        Verb::Pool(command) => pool::run(&line.api.access(), command, &mut terminal).await,
        Verb::Sandbox(command) => sandbox::run(&line.api.access(), command, &mut terminal).await,
    };
    let request = if gateway.is_finished() || end.is_ok() { gateway.await.unwrap() } else { String::new() };
    Ran { end: end.map_err(|error| format!("{error:#}")), out: out.text(), err: err.text(), request }
}

fn answer(status: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\nServer-Timing: queue;dur=1.000\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

#[tokio::test]
async fn an_invocation_sends_what_it_was_given() {
    let words = ["invoke", "wc", "a%20b?c=d", "-d", "text", "-H", "X-A: 1", "-H", "X-A: 2", "-i", "-v"];
    let ran = run(&words, "text", &answer("200 OK", "done")).await;
    assert_eq!(ran.end, Ok(Outcome::Success));
    assert!(ran.request.starts_with("POST /invoke/wc/a%20b?c=d HTTP/1.1\r\n"), "{}", ran.request);
    assert!(ran.request.contains("x-a: 1\r\nx-a: 2\r\n") && ran.request.contains("content-length: 4\r\n"));
    assert!(ran.out.starts_with("HTTP/1.1 200 OK\n") && ran.out.ends_with("\n\ndone"), "{}", ran.out);
    assert!(ran.err.contains("server-timing: queue;dur=1.000"), "{}", ran.err);

    let ran = run(&["invoke", "wc"], "\r\n\r\n", &answer("200 OK", "")).await;
    assert!(ran.request.starts_with("GET /invoke/wc/ HTTP/1.1\r\n"), "{}", ran.request);
}

#[tokio::test]
async fn a_file_is_the_body() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all("x".repeat(200_000).as_bytes()).unwrap();
    file.write_all(b"END").unwrap();
    let data = format!("@{}", file.path().display());
    let ran = run(&["invoke", "wc", "-X", "PUT", "--data", &data], "END", &answer("200 OK", "ok")).await;
    assert_eq!((ran.end, ran.out.as_str()), (Ok(Outcome::Success), "ok"));
    assert!(ran.request.starts_with("PUT ") && ran.request.contains("content-length: 200003\r\n"));
    let ran = run(&["invoke", "wc", "-d", "@/does/not/exist"], "\r\n\r\n", "").await;
    assert!(ran.end.unwrap_err().contains("cannot open /does/not/exist"));
}

#[tokio::test]
async fn an_error_is_printed_and_explained() {
    let body = r#"{"error":{"code":"x","message":"no such thing"},"request_id":"r1"}"#;
    let ran = run(&["invoke", "wc"], "\r\n\r\n", &answer("404 Not Found", body)).await;
    assert_eq!((ran.end, ran.out.as_str()), (Ok(Outcome::Failure), body));
    assert_eq!(ran.err, "HTTP 404 Not Found: no such thing (request r1)\n");
    let cut = "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nfive5";
    let ran = run(&["invoke", "wc"], "\r\n\r\n", cut).await;
    assert!(ran.end.unwrap_err().contains("broke off after 5 bytes"));
}

#[tokio::test]
async fn nobody_there_says_how_to_start() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url: super::ApiUrl = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    drop(listener);
    let mut terminal = Terminal { out: Box::new(io::sink()), err: Box::new(io::sink()) };
    let error = template::run(&url, TemplateCommand::List { json: false }, &mut terminal).await.unwrap_err();
    assert_eq!(error.to_string(), format!("nothing listens on {url}: start it with `make up` or `stasis up`"));
}

#[tokio::test]
async fn a_build_shows_its_steps_and_its_end() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("template.toml"), "name='x'\ncommand='y'").unwrap();
    let dir = folder.path().to_str().unwrap();
    let built = r#"{"event":"step","step":"disk","elapsed_ms":0}
{"event":"step","step":"boot","elapsed_ms":3210}
{"event":"built","unchanged":false,"template":{"name":"x","command":"y","digest":"0123456789abcdef","created_at":1,"kernel_boot_id":"b","build_ms":41234,"null_request_us":1,"memory_bytes":2097153,"made_with":{"stasis":"1","agent":"1","guest_kernel":"6"}}}
"#;
    let ran = run(&["template", "build", dir], "0\r\n\r\n", &answer("200 OK", built)).await;
    assert_eq!(ran.end, Ok(Outcome::Success), "{}", ran.err);
    assert!(ran.request.contains("content-type: application/x-tar\r\n") && ran.request.contains("template.toml"));
    assert_eq!(ran.out, "x is built: digest 0123456789ab, in 41.2 s, 3 MiB of memory in its snapshot\n");
    assert!(ran.err.contains("[  3.2 s] 2/5 booting the kernel …\n"), "{}", ran.err);
    let ran = run(&["template", "build", dir, "--json"], "0\r\n\r\n", &answer("200 OK", built)).await;
    assert_eq!(ran.out, built);

    let failed = r#"{"event":"failed","code":"not_ready","reason":"the command exited with 3","output":"Traceback","console":"[0.1] Linux"}
"#;
    let ran = run(&["template", "build", dir], "0\r\n\r\n", &answer("200 OK", failed)).await;
    assert_eq!(ran.end, Ok(Outcome::Failure));
    for part in ["the command exited with 3", "what the command printed ---\nTraceback", "end ---\n[0.1] Linux"] {
        assert!(ran.err.contains(part), "{}", ran.err);
    }
    let refused = r#"{"error":{"code":"no_capacity","message":"not enough memory"},"request_id":"r"}"#;
    let ran = run(&["template", "build", dir], "0\r\n\r\n", &answer("507 Insufficient Storage", refused)).await;
    assert_eq!(ran.end.unwrap_err(), "template x was not built: not enough memory (request r)");
}

#[tokio::test]
async fn templates_are_listed_and_removed() {
    let ran = run(&["template", "list"], "\r\n\r\n", &answer("200 OK", r#"{"templates":[]}"#)).await;
    assert!(ran.out.starts_with("NAME  DIGEST") && ran.err.contains("stasis template build DIR"), "{}", ran.err);
    let ran = run(&["template", "remove", "x"], "\r\n\r\n", "HTTP/1.1 204 No Content\r\n\r\n").await;
    assert_eq!(ran.end, Ok(Outcome::Success));
    assert!(ran.request.starts_with("DELETE /v1/templates/x HTTP/1.1"), "{}", ran.request);
    let ran = run(&["template", "remove", "x"], "\r\n\r\n", &answer("404 Not Found", "")).await;
    assert!(ran.end.unwrap_err().contains("404"));
}

const EVENTS: &str = "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{\"event\":\"stdout\",\"text\":\"out\\n\"}\n\
                      {\"event\":\"stderr\",\"base64\":\"ZXJy\"}\n{\"event\":\"exited\",\"status\":3}\n";

#[tokio::test]
async fn a_command_s_output_and_status_are_ours() {
    let words = ["sandbox", "exec", "sb-1", "--env", "A=B", "--", "ls", "-l", "--json"];
    let ran = run(&words, "}", EVENTS).await;
    assert_eq!((ran.end, ran.out.as_str(), ran.err.as_str()), (Ok(Outcome::Status(3)), "out\n", "err"));
    assert!(ran.request.starts_with("POST /v1/sandboxes/sb-1/exec HTTP/1.1"), "{}", ran.request);
    assert!(ran.request.contains(r#""command":["ls","-l","--json"],"env":{"A":"B"}"#), "{}", ran.request);

    let ran = run(&["sandbox", "exec", "sb-1", "--json", "--", "ls"], "}", EVENTS).await;
    assert_eq!((ran.end, ran.out.lines().count(), ran.err.as_str()), (Ok(Outcome::Status(3)), 3, ""));

    let cut = &EVENTS[..EVENTS.find("{\"event\":\"exited").unwrap()];
    let ran = run(&["sandbox", "exec", "sb-1", "--", "ls"], "}", cut).await;
    assert!(ran.end.unwrap_err().contains("before the command"));
}

#[tokio::test]
async fn logs_are_printed_and_what_is_not_known_is_said() {
    let body = r#"{"output":"printed","console":null}"#;
    let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    let ran = run(&["sandbox", "logs", "sb-1"], "\r\n\r\n", &answer).await;
    assert_eq!(ran.end, Ok(Outcome::Success));
    assert_eq!(ran.out, "--- output\nprinted\n--- console: none, since it has no process\n");
}

#[tokio::test]
async fn pools_are_listed_inspected_and_set_with_the_tenants_key() {
    let pool = r#"{"template":"wc","tenant":"a","settings":{"min":2,"max":9,"hot":1,"concurrency":5,"schedule":[{"days":["mon","fri"],"from":"08:00","to":"18:00","min":4}]},"target":2,"bound_by":"max_memory","ready":1,"hot":1,"restoring":0,"rewinding":1,"warming":0,"claimed":3,"waiting":0,"refill_per_s":null,"ready_pids":[],"last_failure":null}"#;
    let list = format!(r#"{{"pools":[{pool}]}}"#);
    let ran = run(&["--api-key", "secret", "pool", "list"], "\r\n\r\n", &answer("200 OK", &list)).await;
    assert!(ran.request.starts_with("GET /v1/pools HTTP/1.1\r\n"), "{}", ran.request);
    assert!(ran.request.contains("x-api-key: secret\r\n"), "{}", ran.request);
    let row: Vec<_> = ran.out.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(
        row,
        ["wc", "2", "1", "1", "3", "1", "0", "2", "9", "5", "mon,fri/08:00-18:00/4", "max_memory"],
        "{}",
        ran.out
    );
    let ran = run(&["pool", "list", "--json"], "\r\n\r\n", &answer("200 OK", &list)).await;
    assert_eq!(ran.out, format!("{list}\n"));
    let ran = run(&["pool", "inspect", "wc"], "\r\n\r\n", &answer("200 OK", pool)).await;
    assert!(
        ran.request.starts_with("GET /v1/pools/wc ") && ran.out.contains("\"bound_by\": \"max_memory\""),
        "{}",
        ran.out
    );
    let words = ["pool", "set", "wc", "--hot", "1", "--max-memory", "2GiB", "--scale-to-zero-after", "5m", "--json"];
    let ran = run(&words, "}", &answer("200 OK", pool)).await;
    assert!(ran.request.starts_with("PATCH /v1/pools/wc HTTP/1.1\r\n"), "{}", ran.request);
    let body = ran.request.rsplit("\r\n").next().unwrap();
    assert_eq!(body, r#"{"hot":1,"max_memory":"2048MiB","scale_to_zero_after":"5m"}"#);
    let words = [
        "pool",
        "set",
        "wc",
        "--concurrency",
        "5",
        "--schedule",
        "sun/22:00-06:00/1",
        "--schedule",
        "mon/08:00-18:00/4",
    ];
    let ran = run(&words, "}]}", &answer("200 OK", pool)).await;
    let windows = r#"[{"days":["sun"],"from":"22:00","min":1,"to":"06:00"},{"days":["mon"],"from":"08:00","min":4,"to":"18:00"}]"#;
    assert_eq!(ran.request.rsplit("\r\n").next().unwrap(), format!(r#"{{"concurrency":5,"schedule":{windows}}}"#));
    let ran = run(&["pool", "set", "wc", "--no-schedule"], "}", &answer("200 OK", pool)).await;
    assert!(ran.request.ends_with(r#"{"schedule":[]}"#), "{}", ran.request);
    let refused = r#"{"error":{"code":"invalid","message":"pool.min is 99"},"request_id":"r"}"#;
    let ran = run(&["pool", "set", "wc", "--min", "99"], "}", &answer("400 Bad Request", refused)).await;
    assert!(ran.end.unwrap_err().contains("pool.min is 99"));
}

#[tokio::test]
async fn what_is_inspected_is_json_on_many_lines_or_as_it_came() {
    let body = r#"{"id":"sb-1","state":"running"}"#;
    for verb in ["sandbox", "pool"] {
        let ran = run(&[verb, "inspect", "x"], "\r\n\r\n", &answer("200 OK", body)).await;
        assert_eq!(ran.out, "{\n  \"id\": \"sb-1\",\n  \"state\": \"running\"\n}\n");
        let ran = run(&[verb, "inspect", "x", "--json"], "\r\n\r\n", &answer("200 OK", body)).await;
        assert_eq!(ran.out, format!("{body}\n"));
    }
}
