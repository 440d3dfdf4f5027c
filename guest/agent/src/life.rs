//! The order of the agent's life, from the kernel's first call to the last request.

use std::{
    error::Error,
    fs,
    io::{self, PipeWriter},
    mem,
    net::Shutdown,
    path::Path,
    sync::Arc,
    time::Instant,
};

use nix::{
    sys::{
        mman::{MlockAllFlags, mlockall},
        resource::{Resource, setrlimit},
    },
    unistd::sync,
};
use stasis_guest_wire::{
    AGENT_PORT, BOOT_PORT, HOOK_SOCKET,
    boot::{FromAgent, Start},
    page::WakePage,
};
use vsock::{VMADDR_CID_ANY, VMADDR_CID_HOST, VsockListener, VsockStream};

use crate::{
    boot::{self, BootError, Failed, Ready},
    child::Children,
    console,
    dial::Dialer,
    exec::Commands,
    gate::{Gate, RepairError},
    hooks::Hooks,
    identity::{Identity, IdentityError},
    ioctls::loopback_up,
    mount::{self, MountError},
    output::{KEPT, Output},
    page::{Line, Page},
    ready::Probe,
    repair::{System, set_wall_clock},
    serve::Server,
    start,
};

/// Open files: what a program gets that does not ask, and what it may ask for.
const FILES: (u64, u64) = (65_536, 1_048_576);

/// How much of the function's output goes to the console, a serial port.
const CONSOLE_TAIL: usize = 4096;

/// What another boot would seed its generator with.
const RANDOM_SEED: &str = "/var/lib/systemd/random-seed";

/// What ends a guest.
#[derive(Debug, thiserror::Error)]
pub enum Fatal {
    /// Its file systems.
    #[error("no file systems")]
    Mount(#[from] MountError),
    /// Its identity.
    #[error("no identity")]
    Identity(#[from] IdentityError),
    /// The conversation at power-on, or the function.
    #[error("the power-on failed")]
    Boot(#[from] BootError),
    /// Something of the system.
    #[error("cannot {0}")]
    System(&'static str, #[source] io::Error),
}

/// Lives; why it ended.
pub fn live() -> Fatal {
    match power_on() {
        Ok(server) => Fatal::System("serve", server.run()),
        Err(fatal) => fatal,
    }
}

/// Everything before the snapshot.
fn power_on() -> Result<Server<VsockListener, System>, Fatal> {
    mount::all()?;
    tolerate("loopback", loopback_up());
    tolerate("open files", setrlimit(Resource::RLIMIT_NOFILE, FILES.0, FILES.1));
    let identity = Identity::prepare()?;
    let boot_id = identity.kernel_boot_id().map_err(at("read the kernel's boot id"))?;
    let hooks = Arc::new(listen_for_hooks().map_err(at("listen for runtimes"))?);
    hooks.accept_in_background().map_err(at("accept runtimes"))?;
    // Before the node is called: the listening socket is part of the snapshot.
    let listener = VsockListener::bind_with_cid_port(VMADDR_CID_ANY, AGENT_PORT).map_err(at("listen on vsock"))?;
    listener.set_nonblocking(true).map_err(at("listen on vsock"))?;

    let mut node = VsockStream::connect_with_cid_port(VMADDR_CID_HOST, BOOT_PORT).map_err(at("call the node"))?;
    let hello = FromAgent::Hello {
        agent_version: env!("CARGO_PKG_VERSION").into(),
        kernel_release: fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().into(),
        boot_id,
    };
    let (output, writer) = Output::new().map_err(at("make a pipe"))?;
    let children = Arc::new(Children::default());
    let result = boot::converse(
        &mut node,
        &hello,
        |order| {
            start_function(order, &output, writer, &children)
                .map_err(|error| Failed { reason: console::chain(&*error), output: output.text(KEPT) })
        },
        |order| {
            park(order, identity, hooks, listener, Arc::clone(&output), Arc::clone(&children))
                .map_err(|error| Failed { reason: console::chain(&*error), output: output.text(KEPT) })
        },
    );
    if let Err(BootError::Failed(_)) = &result {
        // The VM's reset would overtake what the node has not read yet; it hangs up, or ends this VM, when it has.
        let _ = node.shutdown(Shutdown::Write);
        let _ = io::copy(&mut node, &mut io::sink());
    }
    let _ = node.shutdown(Shutdown::Both);
    Ok(result?)
}

/// Starts the function and waits until it answers.
fn start_function(
    order: &Start,
    output: &Arc<Output>,
    writer: PipeWriter,
    children: &Arc<Children>,
) -> Result<Ready, Box<dyn Error>> {
    set_wall_clock(order.wall_clock_ns).map_err(|source| RepairError::System { what: "set the wall clock", source })?;
    output.drain_in_background()?;
    let started = Instant::now();
    let told = {
        let output = Arc::clone(output);
        move |exit| console::say(format_args!("the function {exit}; it printed last:\n{}", output.text(CONSOLE_TAIL)))
    };
    // The command keeps the pipe's writing end open in this process: gone with it, the pipe ends with the function.
    let mut command = start::command(order, writer)?;
    let end = children
        .spawn_function(&mut command, told)
        .map_err(|source| RepairError::System { what: "run the start command", source })?;
    drop(command);
    let probe = Probe { port: order.port, path: order.ready_path.clone() };
    let elapsed = probe.wait(started, order.ready_timeout, &end)?;
    Ok(Ready { elapsed, null_requests: probe.null_requests() })
}

/// The agent as it waits, and its wake page where it has one.
type Parked = (Server<VsockListener, System>, Option<WakePage>);

/// Makes all that a wake needs, and makes it resident: after the restore, a page that is touched first costs as much
/// as several system calls.
fn park(
    order: &Start,
    identity: Identity,
    hooks: Arc<Hooks>,
    listener: VsockListener,
    output: Arc<Output>,
    children: Arc<Children>,
) -> Result<Parked, Box<dyn Error>> {
    let commands = Commands::new(order.clone(), children, Arc::clone(&output));
    let mut told = false;
    let deaf = move |error: &io::Error| {
        console::say(format_args!("function is not listening: {error}"));
        if !mem::replace(&mut told, true) {
            console::say(format_args!("it printed last:\n{}", output.text(CONSOLE_TAIL)));
        }
    };
    let mut system = System::new(identity, hooks)?;
    system.rehearse()?;
    let server = Server::new(listener, Gate::new(system), Dialer::new(order.port)?, deaf).with_commands(commands);
    let _ = fs::remove_file(RANDOM_SEED);
    // Last: a page that has to be touched first, and a system call, cost a wake.
    let page = Line::of_console().and_then(Page::new);
    tolerate("pin memory", mlockall(MlockAllFlags::MCL_CURRENT));
    sync();
    match page.and_then(|page| page.wait().map(|at| (page, at))) {
        Ok((page, at)) => Ok((server.with_page(page), Some(at))),
        Err(error) => {
            console::say(format_args!("no wake page: {error}"));
            Ok((server, None))
        }
    }
}

fn listen_for_hooks() -> io::Result<Hooks> {
    use std::os::unix::fs::PermissionsExt;
    let hooks = Hooks::listen(Path::new(HOOK_SOCKET))?;
    fs::set_permissions(HOOK_SOCKET, fs::Permissions::from_mode(0o666))?;
    Ok(hooks)
}

fn at(what: &'static str) -> impl FnOnce(io::Error) -> Fatal {
    move |error| Fatal::System(what, error)
}

fn tolerate<T, E: Error>(what: &str, result: Result<T, E>) {
    if let Err(error) = result {
        console::say(format_args!("{what}: {error}"));
    }
}
