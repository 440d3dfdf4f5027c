use std::os::unix::fs::MetadataExt;

use super::*;

#[test]
fn an_import_keeps_content_and_holes() {
    let dir = tempfile::tempdir().unwrap();
    let (source, target) = (dir.path().join("source"), dir.path().join("target"));
    let file = File::create(&source).unwrap();
    file.set_len(64 << 20).unwrap();
    file.write_all_at(&[7; 3 << 20], 8 << 20).unwrap();
    file.write_all_at(b"end", (64 << 20) - 3).unwrap();
    let mut told = Vec::new();
    import(&source, &target, &mut |done, total| told.push((done, total))).unwrap();
    assert!(fs::read(&source).unwrap() == fs::read(&target).unwrap());
    let blocks = fs::metadata(&target).unwrap().blocks() * 512;
    assert!(blocks < 8 << 20, "{blocks} bytes are allocated");
    assert_eq!(told.last(), Some(&(64 << 20, 64 << 20)));
    assert!(told.is_sorted());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "something partial was left");
}

#[test]
fn an_import_of_nothing_and_of_a_hole() {
    let dir = tempfile::tempdir().unwrap();
    for length in [0, 1, 5 << 20] {
        let (source, target) = (dir.path().join("source"), dir.path().join("target"));
        File::create(&source).unwrap().set_len(length).unwrap();
        import(&source, &target, &mut |_, _| {}).unwrap();
        assert_eq!(fs::metadata(&target).unwrap().len(), length);
    }
}

#[test]
fn a_failed_import_leaves_the_target_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("target");
    fs::write(&target, "old").unwrap();
    let error = import(&dir.path().join("nothing"), &target, &mut |_, _| {}).unwrap_err();
    assert!(error.to_string().contains("nothing"), "{error}");
    assert_eq!(fs::read(&target).unwrap(), b"old");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn a_clone_is_never_a_copy() {
    // The temporary folder either clones, or refuses and leaves nothing.
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("source"), vec![1; 10_000]).unwrap();
    let source = File::open(dir.path().join("source")).unwrap();
    let target = dir.path().join("clone");
    match clone_file(&source, &target) {
        Ok(_) => assert!(supports_reflink(dir.path()).unwrap()),
        Err(CloneError::NoReflink { path, .. }) => {
            assert_eq!(path, target);
            assert!(!target.exists());
            assert!(!supports_reflink(dir.path()).unwrap());
        }
        Err(other) => panic!("{other}"),
    }
    assert!(matches!(clone_file(&source, &dir.path().join("source")), Err(CloneError::Exists { .. })));
    assert_eq!(fs::metadata(dir.path().join("source")).unwrap().len(), 10_000);
}

#[test]
fn files_only_grow() {
    let file = tempfile::tempfile().unwrap();
    assert_eq!(grow(&file, 4096).unwrap(), 4096);
    assert_eq!(grow(&file, 100).unwrap(), 4096);
    assert_eq!(file.metadata().unwrap().len(), 4096);
}
