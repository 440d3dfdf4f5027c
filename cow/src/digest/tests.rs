use std::os::unix::fs::{FileExt, symlink};

use proptest::prelude::*;

use super::*;

const EMPTY: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

fn file_of(bytes: &[u8]) -> File {
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(bytes, 0).unwrap();
    file
}

#[test]
fn zeros_and_holes_are_the_same_and_lengths_differ() {
    assert_eq!(Digest::of(b"").to_string(), EMPTY);
    let sparse = tempfile::tempfile().unwrap();
    sparse.set_len((3 << 20) + 5).unwrap();
    let empty = digest_file(&sparse).unwrap();
    assert_eq!(empty, digest_file(&file_of(&vec![0; (3 << 20) + 5])).unwrap());
    assert_ne!(empty, digest_file(&file_of(&vec![0; (3 << 20) + 4])).unwrap());
    sparse.write_all_at(b"x", (2 << 20) + 70_001).unwrap();
    let mut bytes = vec![0; (3 << 20) + 5];
    bytes[(2 << 20) + 70_001] = b'x';
    assert_eq!(digest_file(&sparse).unwrap(), digest_file(&file_of(&bytes)).unwrap());
    bytes[(2 << 20) + 70_001] = 0;
    bytes[(2 << 20) + 4_465] = b'x';
    assert_ne!(digest_file(&sparse).unwrap(), digest_file(&file_of(&bytes)).unwrap(), "the block's place counts");
}

proptest! {
    #[test]
    fn any_change_of_a_file_counts(at in 0..300_000usize, bit in 0..8u32, filler in 0..2u8) {
        let mut bytes = vec![filler; 300_000];
        let before = digest_file(&file_of(&bytes)).unwrap();
        bytes[at] ^= 1 << bit;
        prop_assert_ne!(before, digest_file(&file_of(&bytes)).unwrap());
    }
}

#[test]
fn one_spelling_only() {
    let digest: Digest = EMPTY.parse().unwrap();
    assert_eq!(digest.to_string(), EMPTY);
    assert_eq!(serde_json::to_string(&digest).unwrap(), format!("{EMPTY:?}"));
    for bad in ["", "e3", &EMPTY.to_uppercase(), &EMPTY[1..], &format!("{EMPTY}00"), &"é".repeat(32), &"g".repeat(64)]
    {
        assert!(bad.parse::<Digest>().is_err(), "{bad}");
    }
}

#[test]
fn everything_in_a_folder_counts() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let mut seen = vec![digest_folder(root).unwrap()];
    let mut changed = |what: &str| {
        let digest = digest_folder(root).unwrap();
        assert!(!seen.contains(&digest), "{what} does not count");
        seen.push(digest);
    };
    fs::write(root.join("a"), "1").unwrap();
    changed("a file");
    fs::write(root.join("a"), "2").unwrap();
    changed("content");
    fs::set_permissions(root.join("a"), fs::Permissions::from_mode(0o755)).unwrap();
    changed("the executable bit");
    fs::create_dir(root.join("b")).unwrap();
    changed("an empty folder");
    fs::rename(root.join("a"), root.join("b/a")).unwrap();
    changed("the place");
    symlink("x", root.join("c")).unwrap();
    changed("a link");
    fs::remove_file(root.join("c")).unwrap();
    symlink("y", root.join("c")).unwrap();
    changed("a link's target");
}

#[test]
fn order_of_creation_and_times_do_not_count() {
    let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for name in ["a", "b", "a.b"] {
        fs::write(one.path().join(name), name).unwrap();
    }
    for name in ["a.b", "b", "a"] {
        fs::write(other.path().join(name), name).unwrap();
    }
    File::open(other.path().join("a")).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
    assert_eq!(digest_folder(one.path()).unwrap(), digest_folder(other.path()).unwrap());
}

proptest! {
    #[test]
    fn different_parts_have_different_digests(
        one in prop::collection::vec(("[ab]{0,3}", "[ab]{0,3}"), 0..4),
        other in prop::collection::vec(("[ab]{0,3}", "[ab]{0,3}"), 0..4),
    ) {
        let of = |parts: &[(String, String)]| {
            parts.iter().fold(Digester::new("test"), |d, (label, part)| d.part(label, part.as_bytes())).finish()
        };
        prop_assert_eq!(one == other, of(&one) == of(&other));
    }

    #[test]
    fn hexadecimal_round_trips(bytes: [u8; 32]) {
        prop_assert_eq!(Digest(bytes).to_string().parse::<Digest>().unwrap(), Digest(bytes));
    }
}
