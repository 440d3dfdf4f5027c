//! The calls of `process.Process`.

use axum::{
    Router,
    extract::{Request, State},
    response::Response,
    routing::post,
};
use futures_util::stream::iter;
use rustix::process::Signal;

use crate::{
    access,
    connect::{self, Code, RpcError, first, stream, unary},
    envd::Envd,
    process::{
        events,
        message::{Empty, Input, Processes, Select, SendInput, SendSignal, SignalName, Start, StreamInput, Update},
        running::Process,
        table,
    },
};

/// Where they are served.
pub(crate) fn routes() -> Router<Envd> {
    Router::new()
        .route("/process.Process/List", post(list))
        .route("/process.Process/Start", post(start))
        .route("/process.Process/Connect", post(connect))
        .route("/process.Process/Update", post(update))
        .route("/process.Process/StreamInput", post(stream_input))
        .route("/process.Process/SendInput", post(send_input))
        .route("/process.Process/SendSignal", post(send_signal))
        .route("/process.Process/CloseStdin", post(close_stdin))
}

async fn list(State(envd): State<Envd>, request: Request) -> Response {
    unary(request, async |_, _: Empty| Ok(Processes { processes: envd.processes().list() })).await
}

async fn start(State(envd): State<Envd>, request: Request) -> Response {
    let call = async |headers, mut frames| {
        let request: Start = first(&mut frames).await?;
        let user = access::user(&envd, &headers)?;
        // Before there is a process.
        events::deadline(&headers)?;
        let (process, subscriber) = table::start(&envd, &user, request)?;
        events::stream(process, subscriber, &headers)
    };
    stream(request, call).await
}

async fn connect(State(envd): State<Envd>, request: Request) -> Response {
    let call = async |headers, mut frames| {
        let request: Select = first(&mut frames).await?;
        let process = envd.processes().known(&request.process)?;
        let subscriber = process.subscribe();
        events::stream(process, subscriber, &headers)
    };
    stream(request, call).await
}

async fn update(State(envd): State<Envd>, request: Request) -> Response {
    let call = async |_, request: Update| {
        let process = envd.processes().running(&request.process)?;
        if let Some(pty) = request.pty {
            let (cols, rows) = pty.size.checked()?;
            process.resize(cols, rows)?;
        }
        Ok(Empty {})
    };
    unary(request, call).await
}

async fn send_input(State(envd): State<Envd>, request: Request) -> Response {
    let call = async |_, request: SendInput| {
        write(&*envd.processes().running(&request.process)?, request.input).await?;
        Ok(Empty {})
    };
    unary(request, call).await
}

async fn stream_input(State(envd): State<Envd>, request: Request) -> Response {
    let call = async |_, mut frames: connect::Frames| {
        let mut process = None;
        while let Some(message) = frames.next().await? {
            let message: StreamInput = connect::parse(&message)?;
            if let Some(start) = message.start {
                process = Some(envd.processes().running(&start.process)?);
            } else if let Some(data) = message.data {
                let process =
                    process.as_ref().ok_or_else(|| RpcError::invalid("the stream does not begin with start"))?;
                write(process, data.input).await?;
            } else if message.keepalive.is_none() {
                return Err(RpcError::new(
                    Code::Unimplemented,
                    "invalid event type: none of start, data and keepalive",
                ));
            }
        }
        Ok(iter([connect::message(&Empty {}), connect::end(None)]))
    };
    stream(request, call).await
}

async fn write(process: &Process, input: Input) -> Result<(), RpcError> {
    match input {
        Input { stdin: Some(bytes), .. } => process.write_stdin(&bytes).await,
        Input { pty: Some(bytes), .. } => process.write_pty(&bytes).await,
        Input { stdin: None, pty: None } => {
            Err(RpcError::new(Code::Unimplemented, "invalid input type: neither stdin nor pty"))
        }
    }
}

async fn send_signal(State(envd): State<Envd>, request: Request) -> Response {
    let call = async |_, request: SendSignal| {
        let process = envd.processes().running(&request.process)?;
        process.signal(signal(request.signal)?)?;
        Ok(Empty {})
    };
    unary(request, call).await
}

/// By the numbers of the system, which the enumeration uses too.
fn signal(name: Option<SignalName>) -> Result<Signal, RpcError> {
    let unknown = |name: String| RpcError::new(Code::Unimplemented, format!("invalid signal: {name}"));
    match name {
        Some(SignalName::Name(name)) => match name.as_str() {
            "SIGNAL_SIGTERM" => Ok(Signal::TERM),
            "SIGNAL_SIGKILL" => Ok(Signal::KILL),
            _ => Err(unknown(name)),
        },
        Some(SignalName::Number(15)) => Ok(Signal::TERM),
        Some(SignalName::Number(9)) => Ok(Signal::KILL),
        Some(SignalName::Number(number)) => Err(unknown(number.to_string())),
        None => Err(unknown("SIGNAL_UNSPECIFIED".into())),
    }
}

async fn close_stdin(State(envd): State<Envd>, request: Request) -> Response {
    let call = async |_, request: Select| {
        envd.processes().running(&request.process)?.close_stdin().await?;
        Ok(Empty {})
    };
    unary(request, call).await
}
