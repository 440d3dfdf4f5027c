use std::{
    fs::{self, File, OpenOptions, Permissions},
    os::unix::fs::{FileExt, PermissionsExt, symlink},
    path::{Path, PathBuf},
};

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::Digest;

struct Published {
    parent: tempfile::TempDir,
    folder: PathBuf,
    manifest: Manifest,
}

fn publish(memory: &[u8]) -> Published {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("snapshot");
    let staging = Staging::new(parent.path()).unwrap();
    fs::write(staging.path("memory"), memory).unwrap();
    fs::write(staging.path("state.json"), "{}").unwrap();
    fs::write(staging.path("empty"), "").unwrap();
    let manifest = staging.publish(&folder, json!({ "kernel": "6.1", "x": 0.1 }), 1_700_000_000).unwrap();
    Published { parent, folder, manifest }
}

/// Replaces a file, as an attacker who is root would.
fn tamper(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut content = fs::read(path).unwrap();
    change(&mut content);
    fs::set_permissions(path, Permissions::from_mode(0o600)).unwrap();
    fs::write(path, content).unwrap();
}

/// A manifest with a correct digest, whatever it says.
fn forge(folder: &Path, change: impl FnOnce(&mut serde_json::Value)) {
    tamper(&folder.join(MANIFEST), |content| {
        let mut manifest = serde_json::from_slice::<serde_json::Value>(content).unwrap()["manifest"].clone();
        change(&mut manifest);
        let manifest = manifest.to_string();
        let digest = Digest::of(manifest.as_bytes());
        *content = format!("{{\"manifest\":{manifest},\"sha256\":\"{digest}\"}}").into_bytes();
    });
}

#[test]
fn what_was_published_is_opened() {
    let published = publish(&[7; 100_000]);
    let snapshot = Snapshot::open(&published.folder).unwrap();
    assert_eq!(*snapshot.manifest(), published.manifest);
    assert_eq!(snapshot.manifest().parts["memory"].bytes, 100_000);
    assert_eq!(snapshot.manifest().parts.len(), 3);
    assert_eq!(snapshot.part("memory").unwrap().metadata().unwrap().len(), 100_000);
    assert!(matches!(snapshot.part("disk"), Err(SnapshotError::Manifest { .. })));
    assert_eq!(fs::read_dir(published.parent.path()).unwrap().count(), 1, "the staging folder is left");
}

#[test]
fn a_snapshot_replaces_nothing() {
    let published = publish(b"first");
    let staging = Staging::new(published.parent.path()).unwrap();
    fs::write(staging.path("memory"), "second").unwrap();
    let refused = staging.publish(&published.folder, json!(null), 0);
    assert!(matches!(refused, Err(PublishError::Exists { path }) if path == published.folder));
    assert_eq!(Snapshot::open(&published.folder).unwrap().manifest().parts["memory"].bytes, 5);
    assert_eq!(fs::read_dir(published.parent.path()).unwrap().count(), 1);
}

#[test]
fn only_plain_files_are_parts() {
    let parent = tempfile::tempdir().unwrap();
    let attempts: [&dyn Fn(&Staging); 5] = [
        &|staging| fs::create_dir(staging.path("folder")).unwrap(),
        &|staging| symlink("/etc/passwd", staging.path("link")).unwrap(),
        &|staging| fs::write(staging.path(MANIFEST), "{}").unwrap(),
        &|staging| fs::write(staging.path(".hidden"), "").unwrap(),
        &|staging| fs::write(staging.path("a b"), "").unwrap(),
    ];
    for attempt in attempts {
        let staging = Staging::new(parent.path()).unwrap();
        attempt(&staging);
        let refused = staging.publish(&parent.path().join("x"), json!(null), 0);
        assert!(matches!(refused, Err(PublishError::Part { .. })), "{refused:?}");
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
    }
}

#[test]
fn a_partial_snapshot_is_never_visible_and_is_swept() {
    let parent = tempfile::tempdir().unwrap();
    let visible = || {
        let names = fs::read_dir(parent.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| !name.starts_with('.')).count()
    };
    let staging = Staging::new(parent.path()).unwrap();
    let path = staging.path("memory");
    fs::write(&path, "x").unwrap();
    assert_eq!(visible(), 0);
    assert!(matches!(Snapshot::open(path.parent().unwrap()), Err(SnapshotError::Missing { .. })));
    drop(staging);
    assert!(!path.exists());

    std::mem::forget(Staging::new(parent.path()).unwrap());
    fs::create_dir(parent.path().join("x.staging")).unwrap();
    fs::write(parent.path().join(".y.staging"), "a file").unwrap();
    assert_eq!(sweep(parent.path()).unwrap(), 1);
    assert_eq!(sweep(parent.path()).unwrap(), 0);
    assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 2);
}

#[test]
fn refusals_are_typed() {
    type Case<'a> = (&'a str, &'a dyn Fn(&Path), fn(&SnapshotError) -> bool);
    let cases: [Case<'_>; 11] = [
        ("no folder", &|f| fs::remove_dir_all(f).unwrap(), |e| matches!(e, SnapshotError::Missing { .. })),
        ("no manifest", &|f| fs::remove_file(f.join(MANIFEST)).unwrap(), |e| {
            matches!(e, SnapshotError::Missing { .. })
        }),
        ("no part", &|f| fs::remove_file(f.join("memory")).unwrap(), |e| matches!(e, SnapshotError::Missing { .. })),
        ("shorter", &|f| tamper(&f.join("memory"), |c| c.truncate(2)), |e| {
            matches!(e, SnapshotError::Truncated { expected: 4, found: 2, .. })
        }),
        ("longer", &|f| tamper(&f.join("memory"), |c| c.push(0)), |e| matches!(e, SnapshotError::Altered { .. })),
        ("other", &|f| tamper(&f.join("memory"), |c| c[0] = 0), |e| matches!(e, SnapshotError::Altered { .. })),
        ("extra", &|f| fs::write(f.join("extra"), "").unwrap(), |e| matches!(e, SnapshotError::Unexpected { .. })),
        (
            "a link",
            &|f| {
                fs::rename(f.join("memory"), f.parent().unwrap().join("m")).unwrap();
                symlink("../m", f.join("memory")).unwrap();
            },
            |e| matches!(e, SnapshotError::Unexpected { .. }),
        ),
        ("newer", &|f| forge(f, |m| m["format"] = json!(2)), |e| {
            matches!(e, SnapshotError::Version { found: 2, supported: 1 })
        }),
        ("a field", &|f| forge(f, |m| m["y"] = json!(2)), |e| matches!(e, SnapshotError::Manifest { .. })),
        ("a way out", &|f| forge(f, |m| m["parts"]["../m"] = m["parts"]["memory"].clone()), |e| {
            matches!(e, SnapshotError::Manifest { .. })
        }),
    ];
    for (name, harm, expected) in cases {
        let published = publish(b"four");
        harm(&published.folder);
        let error = Snapshot::open(&published.folder).unwrap_err();
        assert!(expected(&error), "{name}: {error:?}");
    }
}

#[test]
fn a_part_altered_after_verification_is_refused() {
    let published = publish(&[1; 8192]);
    let snapshot = Snapshot::open(&published.folder).unwrap();
    let path = published.folder.join("memory");
    fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(&[2], 5000).unwrap();
    // Whoever resets the time of modification still leaves the time of change.
    file.set_modified(std::time::UNIX_EPOCH).unwrap();
    assert!(matches!(snapshot.part("memory"), Err(SnapshotError::Altered { part }) if part == "memory"));
    assert!(snapshot.part("state.json").is_ok());
    assert!(Snapshot::open(&published.folder).is_err());
}

#[test]
fn reading_a_part_does_not_alter_it() {
    let published = publish(&[1; 8192]);
    let snapshot = Snapshot::open(&published.folder).unwrap();
    fs::read(published.folder.join("memory")).unwrap();
    let mut buffer = [0; 100];
    File::open(published.folder.join("memory")).unwrap().read_exact_at(&mut buffer, 0).unwrap();
    snapshot.part("memory").unwrap();
}

#[test]
fn every_single_byte_counts() {
    let published = publish(&[3; 300]);
    for file in ["memory", "state.json", MANIFEST] {
        let path = published.folder.join(file);
        let original = fs::read(&path).unwrap();
        for at in 0..original.len() {
            // The last bit, the case of a letter, the sign.
            for bit in [0x01, 0x20, 0x80] {
                tamper(&path, |content| content[at] ^= bit);
                assert!(Snapshot::open(&published.folder).is_err(), "byte {at} of {file}, bit {bit:#x}");
                tamper(&path, |content| content.clone_from(&original));
            }
            tamper(&path, |content| content.truncate(at));
            assert!(Snapshot::open(&published.folder).is_err(), "{file} truncated to {at} bytes");
            tamper(&path, |content| content.clone_from(&original));
        }
        Snapshot::open(&published.folder).unwrap();
    }
}

fn any_file() -> impl Strategy<Value = &'static str> {
    prop_oneof![Just("memory"), Just("state.json"), Just(MANIFEST)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_changed_byte_is_refused(file in any_file(), at: prop::sample::Index, change in 1u8..=255) {
        let published = publish(&[3; 700]);
        tamper(&published.folder.join(file), |content| { let at = at.index(content.len()); content[at] ^= change; });
        prop_assert!(Snapshot::open(&published.folder).is_err());
    }

    #[test]
    fn any_truncation_is_refused(file in any_file(), at: prop::sample::Index) {
        let published = publish(&[3; 700]);
        tamper(&published.folder.join(file), |content| content.truncate(at.index(content.len())));
        prop_assert!(Snapshot::open(&published.folder).is_err());
    }

    #[test]
    fn any_insertion_is_refused(file in any_file(), at: prop::sample::Index, byte in prop_oneof![Just(b' '), any::<u8>()]) {
        let published = publish(&[3; 700]);
        tamper(&published.folder.join(file), |content| content.insert(at.index(content.len() + 1), byte));
        prop_assert!(Snapshot::open(&published.folder).is_err());
    }
}
