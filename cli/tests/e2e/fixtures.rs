//! Templates and texts.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::world::repository;

/// A sample's folder.
pub(crate) fn example(name: &str) -> PathBuf {
    repository().join("examples").join(name)
}

/// Writes a template's folder.
pub(crate) fn folder(at: &Path, spec: &str) -> PathBuf {
    fs::create_dir_all(at).unwrap();
    fs::write(at.join("template.toml"), spec).unwrap();
    at.to_owned()
}

/// The identity sample under another name, with a small pool, as an archive.
pub(crate) fn identity_as(name: &str) -> Vec<u8> {
    identity(name, 1, "")
}

/// The `identity` example with another name, and its memory compressed.
pub(crate) fn identity_compressed(name: &str) -> Vec<u8> {
    identity(name, 1, "[snapshot]\nmemory = \"compressed\"\n")
}

/// The `identity` example with another name, two vCPUs, and every device that a template can have.
pub(crate) fn identity_of_two(name: &str) -> Vec<u8> {
    identity(name, 2, "[devices]\nrng = true\nballoon = true\n")
}

/// A template of the bare guest, which has no use for a command. `pool`: more of its pool's settings.
pub(crate) fn bare(name: &str, pool: &str) -> Vec<u8> {
    let spec =
        format!("name = \"{name}\"\ncommand = \"none\"\nmemory = \"64MiB\"\ndisk = \"64MiB\"\n[pool]\nmin = 1\n{pool}");
    archive(&[("template.toml", spec.as_bytes())])
}

fn identity(name: &str, cpus: u32, more: &str) -> Vec<u8> {
    let spec = fs::read_to_string(example("identity").join("template.toml")).unwrap();
    let spec = spec.replace("name = \"identity\"", &format!("name = \"{name}\"\ncpu = {cpus}"));
    let code = fs::read(example("identity").join("main.py")).unwrap();
    archive(&[("template.toml", format!("{spec}\n[pool]\nmin = 1\n{more}").as_bytes()), ("main.py", &code)])
}

pub(crate) fn archive(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut archive = tar::Builder::new(Vec::new());
    for (path, content) in files {
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o644);
        header.set_size(content.len() as u64);
        archive.append_data(&mut header, path, *content).unwrap();
    }
    archive.into_inner().unwrap()
}

/// Ten million bytes of words, the common ones often, with all kinds of gaps between them.
pub(crate) fn long_text() -> Vec<u8> {
    const GAPS: [&[u8]; 8] = [b" ", b" ", b"\n", b", ", b"\r\n", b"_", b"\t-- ", b". "];
    let mut text = Vec::with_capacity(10_000_000 + 64);
    // Knuth's MMIX generator.
    let mut state = 2u64;
    while text.len() < 10_000_000 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let (rank, pick) = ((state >> 33) % 1000, (state >> 60) as usize);
        let word = rank * rank / 800;
        let word = if state & (1 << 40) == 0 { format!("Word{word}") } else { format!("wORD{word}") };
        text.extend_from_slice(word.as_bytes());
        text.extend_from_slice(GAPS[pick % GAPS.len()]);
    }
    text.truncate(10_000_000);
    text
}

/// Every byte there is, and some Latin-1 that is no UTF-8.
pub(crate) fn not_utf8() -> Vec<u8> {
    let mut text: Vec<u8> = (0..=255).collect();
    text.extend_from_slice(b"Gr\xf6\xdfe gr\xf6\xdfe GR\xd6SSE \xff\xfe\x00naive na\xefve\nlast line without an end");
    text.repeat(3)
}
