use std::os::unix::fs::symlink;

use proptest::prelude::*;

use super::*;

const EMPTY: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

#[test]
fn known_digests() {
    assert_eq!(Digest::of(b"").to_string(), EMPTY);
    let file = tempfile::tempfile().unwrap();
    assert_eq!(digest_file(&file).unwrap().to_string(), EMPTY);
    file.set_len(3 << 20).unwrap();
    file.write_all_at(b"x", (2 << 20) + 1).unwrap();
    let mut bytes = vec![0; 3 << 20];
    bytes[(2 << 20) + 1] = b'x';
    assert_eq!(digest_file(&file).unwrap(), Digest::of(&bytes));
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
