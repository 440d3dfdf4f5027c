use std::{
    fs::File,
    os::unix::fs::{FileExt, MetadataExt, symlink},
};

use super::*;
use crate::tool::Tool;

fn sample(root: &Path) {
    fs::create_dir_all(root.join("a/b")).unwrap();
    fs::write(root.join("a/b/text"), "hello").unwrap();
    fs::write(root.join("large"), vec![9; 3_000_000]).unwrap();
    symlink("a/b/text", root.join("link")).unwrap();
}

fn check(image: &Path) {
    Tool::for_tests("e2fsck").run([OsStr::new("-fn"), image.as_os_str()], &[]).unwrap();
}

#[test]
fn an_image_has_the_content_and_the_same_bytes_each_time() {
    let dir = tempfile::tempdir().unwrap();
    let (folder, one, other) = (dir.path().join("folder"), dir.path().join("one"), dir.path().join("other"));
    sample(&folder);
    // The first reading may set access times.
    make_ext4(&folder, &dir.path().join("zero"), None).unwrap();
    make_ext4(&folder, &one, None).unwrap();
    make_ext4(&folder, &other, None).unwrap();
    check(&one);
    assert!(fs::read(&one).unwrap() == fs::read(&other).unwrap());
    assert_eq!(fs::metadata(&one).unwrap().len(), 4 * MIB);
    let read = ["-R", "cat /a/b/text", one.to_str().unwrap()];
    assert_eq!(Tool::for_tests("debugfs").run(read, &[]).unwrap(), "hello");
    let features = Tool::for_tests("dumpe2fs").run([OsStr::new("-h"), one.as_os_str()], &[]).unwrap();
    assert!(!features.contains("has_journal"), "{features}");
    assert!(features.contains(UUID), "{features}");
}

#[test]
fn computed_sizes_suffice_for_awkward_folders() {
    let dir = tempfile::tempdir().unwrap();
    let make = |name: &str, fill: &dyn Fn(&Path)| {
        let folder = dir.path().join(name);
        fs::create_dir(&folder).unwrap();
        fill(&folder);
        let image = dir.path().join(format!("{name}.ext4"));
        make_ext4(&folder, &image, None).unwrap();
        check(&image);
        let length = fs::metadata(&image).unwrap().len();
        assert!(length >= MIB && length.is_multiple_of(MIB), "{name}: {length}");
    };
    make("empty", &|_| {});
    make("many", &|folder| {
        for i in 0..3000 {
            fs::write(folder.join(format!("{i:->200}")), "x").unwrap();
        }
    });
    make("deep", &|folder| fs::create_dir_all(folder.join("d/".repeat(300))).unwrap());
    make("links", &|folder| (0..500).for_each(|i| symlink("y".repeat(500), folder.join(i.to_string())).unwrap()));
    make("large", &|folder| fs::write(folder.join("x"), vec![1; 150 << 20]).unwrap());
    make("sparse", &|folder| {
        let file = File::create(folder.join("x")).unwrap();
        file.set_len(40 << 20).unwrap();
        (0..1000).for_each(|i| file.write_all_at(b"x", i * 40_000).unwrap());
    });
    assert!(fs::metadata(dir.path().join("sparse.ext4")).unwrap().blocks() * 512 < 20 << 20);
}

#[test]
fn too_small_a_size_is_refused_and_nothing_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let (folder, image) = (dir.path().join("folder"), dir.path().join("image"));
    sample(&folder);
    let error = make_ext4(&folder, &image, Some(MIB)).unwrap_err();
    let ImageError::Make { source, bytes, .. } = &error else { panic!("{error}") };
    assert_eq!(*bytes, MIB);
    assert!(source.to_string().contains("Could not allocate block"), "{source}");
    assert!(!image.exists());
}

#[test]
fn nothing_is_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    fs::write(&image, "precious").unwrap();
    assert!(matches!(make_ext4(dir.path(), &image, None), Err(ImageError::Create { .. })));
    assert_eq!(fs::read(&image).unwrap(), b"precious");
    assert!(matches!(make_ext4(&dir.path().join("no"), &dir.path().join("x"), None), Err(ImageError::Walk(_))));
}
