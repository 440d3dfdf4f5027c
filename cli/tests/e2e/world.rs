//! What all cases share: the binary, the server, and the two sample templates in it that most of them use.

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use tempfile::TempDir;

use crate::{cli::Stasis, fixtures, host, http::Api, lane::Lane, server::Server};

/// Room for the 10 MB text, and little more, so that a body over it is soon sent.
pub(crate) const MAX_BODY: &str = "12MiB";

pub(crate) struct World {
    pub(crate) api: Api,
    /// The binary, speaking to the server.
    pub(crate) stasis: Stasis,
    /// In the direct lane.
    pub(crate) server: Option<Server>,
    scratch: TempDir,
}

impl World {
    /// Starts the server where that is for us to do, and builds the samples; where no case uses them (`shared`), neither.
    pub(crate) fn start(lane: Lane, shared: bool) -> Self {
        let scratch = tempfile::Builder::new().prefix("e2e-").tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let (server, url) = match lane {
            Lane::Rig { url } => (None, url),
            Lane::Direct if !shared => (None, "http://nobody".to_owned()),
            Lane::Direct => {
                let server = Server::start(&scratch.path().join("main"), &["--max-body", MAX_BODY]);
                let url = server.url().to_owned();
                (Some(server), url)
            }
        };
        let world = Self { api: Api::at(&url), stasis: Stasis::speaking_to(&url), server, scratch };
        let samples = if shared { ["wordcount", "identity"].as_slice() } else { &[] };
        for name in samples {
            println!("building a sample at {url}");
            println!("{}", world.build_sample(name));
        }
        world
    }

    /// Builds a sample, if it is not there yet. Returns what the command printed.
    pub(crate) fn build_sample(&self, name: &str) -> String {
        let built = self.stasis.run(["template", "build", fixtures::example(name).to_str().unwrap()]);
        assert_eq!(built.code, 0, "{name} cannot be built:\n{}{}", built.stdout, built.stderr);
        built.stdout.trim().to_owned()
    }

    /// The server of the direct lane.
    pub(crate) fn host(&self) -> &Server {
        self.server.as_ref().expect("a case that needs the host runs in the direct lane only")
    }

    /// A new path for a data directory or a file.
    pub(crate) fn place(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    pub(crate) fn file(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.place(name);
        std::fs::write(&path, content).unwrap();
        path
    }

    /// Stops the server, and lists what it and those of the cases have left.
    pub(crate) fn stop(&self) -> Vec<String> {
        let mut left = self.server.as_ref().map(Server::stop).unwrap_or_default();
        left.extend(host::leftovers(self.scratch.path()));
        // What failed cases have left must not stay.
        for data in std::fs::read_dir(self.scratch.path()).unwrap().filter_map(Result::ok) {
            self.stasis.run(["down".as_ref(), "--kill".as_ref(), "--data".as_ref(), data.path().as_os_str()]);
        }
        let _ = std::fs::remove_dir_all(self.scratch.path());
        left
    }

    /// `/v1/pools`, the one of `template`.
    pub(crate) fn pool(&self, template: &str) -> serde_json::Value {
        pool(&self.api, template)
    }
}

/// The pool of `template`.
pub(crate) fn pool(api: &Api, template: &str) -> serde_json::Value {
    let pools = api.get("/v1/pools").json();
    let pools = pools["pools"].as_array().unwrap();
    pools.iter().find(|pool| pool["template"] == template).unwrap_or_else(|| panic!("no pool of {template}")).clone()
}

/// Asks until there is an answer; the asking itself, which goes to the server, is the pause.
pub(crate) fn eventually<T>(what: &str, limit: Duration, mut ask: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        match ask() {
            Some(answer) => return answer,
            None => assert!(begun.elapsed() < limit, "{what}: not within {limit:?}"),
        }
    }
}

/// Asks until the answer is this one.
pub(crate) fn becomes<T: PartialEq + std::fmt::Debug>(expected: &T, limit: Duration, mut ask: impl FnMut() -> T) -> T {
    let begun = Instant::now();
    loop {
        let now = ask();
        if now == *expected {
            return now;
        }
        assert!(begun.elapsed() < limit, "within {limit:?} it is not what it was:\n now {now:?}\n was {expected:?}");
    }
}

/// The repository.
pub(crate) fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}
