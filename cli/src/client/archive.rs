//! A template's folder as a tar archive: the same bytes for the same content, whoever makes it and when.

use std::{
    fs::{self, File},
    io::{self, Read as _, Write},
    os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};
use stasis_pool_api::TemplateSpec;
use tar::{EntryType, Header};

const SPEC: &str = "template.toml";
const MAX_FOLDER: u64 = 512 << 20;

/// A folder that can be sent.
#[derive(Debug)]
pub(super) struct Folder {
    root: PathBuf,
    pub(super) spec: TemplateSpec,
    entries: Vec<Entry>,
}

/// By path inside the folder, sorted.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Entry {
    path: PathBuf,
    kind: Kind,
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Folder,
    File { size: u64, executable: bool },
    Link { target: PathBuf },
}

impl Folder {
    /// Looks through a folder, and refuses what the gateway would refuse.
    pub(super) fn open(root: &Path) -> anyhow::Result<Self> {
        let file = root.join(SPEC);
        let text = match fs::read_to_string(&file) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                bail!(
                    "{} does not exist: a template is a folder with a {SPEC} that has at least `name` and `command`",
                    file.display()
                )
            }
            Err(error) => return Err(error).with_context(|| format!("cannot read {}", file.display())),
        };
        let spec = TemplateSpec::parse(&text).with_context(|| format!("{} is refused", file.display()))?;

        let mut entries = Vec::new();
        collect(root, Path::new(""), &mut entries)?;
        entries.sort_unstable();
        let size: u64 =
            entries.iter().map(|entry| if let Kind::File { size, .. } = entry.kind { size } else { 0 }).sum();
        if size > MAX_FOLDER {
            bail!(
                "{} holds {} MiB, but a template's folder may hold at most {} MiB: remove what the function does not need",
                root.display(),
                size.div_ceil(1 << 20),
                MAX_FOLDER >> 20
            );
        }
        Ok(Self { root: root.to_owned(), spec, entries })
    }

    /// Writes the archive.
    pub(super) fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let mut archive = tar::Builder::new(out);
        for Entry { path, kind } in &self.entries {
            let mut header = Header::new_gnu();
            header.set_mtime(0);
            header.set_uid(0);
            header.set_gid(0);
            header.set_size(0);
            match kind {
                Kind::Folder => {
                    header.set_entry_type(EntryType::Directory);
                    header.set_mode(0o755);
                    archive.append_data(&mut header, path, io::empty())?;
                }
                Kind::Link { target } => {
                    header.set_entry_type(EntryType::Symlink);
                    header.set_mode(0o777);
                    archive.append_link(&mut header, path, target)?;
                }
                Kind::File { size, executable } => {
                    header.set_entry_type(EntryType::Regular);
                    header.set_mode(if *executable { 0o755 } else { 0o644 });
                    header.set_size(*size);
                    let full = self.root.join(path);
                    let file = File::open(&full).map_err(|error| named(&full, &error.to_string()))?;
                    if file.metadata()?.len() != *size {
                        return Err(named(&full, "it changed while it was sent"));
                    }
                    archive.append_data(&mut header, path, file.take(*size))?;
                }
            }
        }
        archive.finish()
    }
}

fn collect(root: &Path, inside: &Path, entries: &mut Vec<Entry>) -> anyhow::Result<()> {
    let folder = root.join(inside);
    let cannot = || format!("cannot read {}", folder.display());
    for item in fs::read_dir(&folder).with_context(cannot)? {
        let item = item.with_context(cannot)?;
        let path = inside.join(item.file_name());
        let full = item.path();
        let meta = item.metadata().with_context(|| format!("cannot read {}", full.display()))?;
        let kind = meta.file_type();
        let kind = if kind.is_dir() {
            collect(root, &path, entries)?;
            Kind::Folder
        } else if kind.is_symlink() {
            Kind::Link { target: fs::read_link(&full).with_context(|| format!("cannot read {}", full.display()))? }
        } else if kind.is_file() {
            Kind::File { size: meta.size(), executable: meta.permissions().mode() & 0o111 != 0 }
        } else {
            let what = match kind {
                kind if kind.is_socket() => "a socket",
                kind if kind.is_fifo() => "a pipe",
                _ => "a device",
            };
            bail!("{} is {what}, which a template cannot hold: remove it", full.display());
        };
        entries.push(Entry { path, kind });
    }
    Ok(())
}

fn named(path: &Path, what: &str) -> io::Error {
    io::Error::other(format!("{}: {what}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::{fs::symlink, net::UnixListener};

    use super::*;

    fn folder(order: &[&str]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("lib")).unwrap();
        for name in order {
            fs::write(root.path().join(name), format!("content of {name}")).unwrap();
        }
        fs::write(root.path().join(SPEC), "name = 'x'\ncommand = 'y'").unwrap();
        fs::set_permissions(root.path().join("run"), fs::Permissions::from_mode(0o700)).unwrap();
        symlink("../elsewhere", root.path().join("link")).unwrap();
        root
    }

    fn archive(root: &Path) -> Vec<u8> {
        let mut bytes = Vec::new();
        Folder::open(root).unwrap().write(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn the_same_content_gives_the_same_bytes() {
        let one = archive(folder(&["run", "lib/b", "lib/a"]).path());
        assert_eq!(one, archive(folder(&["lib/a", "lib/b", "run"]).path()));

        let mut archive = tar::Archive::new(one.as_slice());
        let mut seen = Vec::new();
        for entry in archive.entries().unwrap() {
            let entry = entry.unwrap();
            let header = entry.header();
            assert_eq!((header.mtime().unwrap(), header.uid().unwrap(), header.gid().unwrap()), (0, 0, 0));
            seen.push(format!("{} {:o}", entry.path().unwrap().display(), header.mode().unwrap()));
            if header.entry_type() == EntryType::Symlink {
                assert_eq!(entry.link_name().unwrap().unwrap(), Path::new("../elsewhere"));
            }
        }
        assert_eq!(seen, ["lib 755", "lib/a 644", "lib/b 644", "link 777", "run 755", "template.toml 644"]);
    }

    #[test]
    fn what_cannot_be_a_template_is_refused_with_the_reason() {
        let refusal = |root: &Path| format!("{:#}", Folder::open(root).unwrap_err());
        let empty = tempfile::tempdir().unwrap();
        assert!(refusal(empty.path()).contains("template.toml"));
        assert!(refusal(&empty.path().join("none")).contains("template.toml"));

        let root = folder(&["run"]);
        let _socket = UnixListener::bind(root.path().join("sock")).unwrap();
        assert!(refusal(root.path()).contains("is a socket"));
        fs::remove_file(root.path().join("sock")).unwrap();

        File::create(root.path().join("huge")).unwrap().set_len(MAX_FOLDER + 1).unwrap();
        assert!(refusal(root.path()).contains("at most 512 MiB"));

        fs::write(root.path().join(SPEC), "name = 'x'\ncommand = 'y'\nport = 0").unwrap();
        assert!(refusal(root.path()).contains("port is 0"));
    }
}
