use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

/// An image of `count` frames, of which these are not zero.
fn image(count: u32, contents: &BTreeMap<u32, Vec<u8>>) -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(u64::from(count) * FRAME as u64).unwrap();
    for (frame, content) in contents {
        file.write_all_at(content, u64::from(*frame) * FRAME as u64).unwrap();
    }
    file
}

fn framed(image: &File) -> (File, FramesReport) {
    let to = tempfile::tempfile().unwrap();
    let report = write_frames(image, &to).unwrap();
    (to, report)
}

fn contents_of(file: &File, count: u32) -> Result<Vec<u8>, FramesError> {
    let mut frames = Frames::open(file.try_clone().unwrap())?;
    let (mut all, mut one) = (Vec::new(), Box::new([0xaa; FRAME]));
    for frame in 0..count {
        frames.read(frame, &mut one)?;
        all.extend_from_slice(&one[..]);
    }
    Ok(all)
}

fn bytes_of(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(file.metadata().unwrap().len()).unwrap()];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

fn any_contents() -> impl Strategy<Value = (u32, BTreeMap<u32, Vec<u8>>)> {
    // Short runs at a frame's begin, so that compressed lengths differ; now and then a page that is written and zero.
    let content = prop::collection::vec(prop_oneof![Just(0), any::<u8>()], 0..2000);
    (1u32..40, prop::collection::btree_map(0u32..40, content, 0..20)).prop_map(|(count, mut contents)| {
        contents.retain(|frame, _| *frame < count);
        (count, contents)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn what_was_written_is_read((count, contents) in any_contents()) {
        let image = image(count, &contents);
        let (file, report) = framed(&image);
        let not_zero = contents.values().filter(|content| content.iter().any(|byte| *byte != 0)).count();
        prop_assert_eq!(report.frames as usize, not_zero);
        prop_assert_eq!(report.bytes, file.metadata().unwrap().len());
        prop_assert!(contents_of(&file, count).unwrap() == bytes_of(&image));
        prop_assert_eq!(Frames::open(file).unwrap().image_bytes(), u64::from(count) * FRAME as u64);
    }

    #[test]
    fn no_changed_byte_is_ever_read(at: prop::sample::Index, change in 1u8..=255) {
        let (file, count) = sample();
        let mut bytes = bytes_of(&file);
        let at = at.index(bytes.len());
        bytes[at] ^= change;
        file.write_all_at(&bytes, 0).unwrap();
        prop_assert!(contents_of(&file, count).is_err());
    }

    #[test]
    fn no_cut_is_overlooked(at: prop::sample::Index) {
        let (file, _) = sample();
        file.set_len(at.index(bytes_of(&file).len()) as u64).unwrap();
        prop_assert!(Frames::open(file).is_err());
    }

    #[test]
    fn no_bytes_make_it_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..500), ours: bool) {
        if ours {
            bytes.extend(b"STASISFR\x01\0\0\0");
            bytes.resize(bytes.len() + TAIL - 12, 1);
        }
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&bytes, 0).unwrap();
        prop_assert!(Frames::open(file).is_err());
    }
}

/// Three frames that are not zero, among five.
fn sample() -> (File, u32) {
    let contents = [(0, vec![1; 300]), (1, (0..=255).collect()), (3, vec![3; FRAME])];
    (framed(&image(5, &contents.into())).0, 5)
}

#[test]
fn a_frame_that_is_altered_or_cut_under_way_is_refused_and_its_neighbours_are_not() {
    let (file, _) = sample();
    let mut frames = Frames::open(file.try_clone().unwrap()).unwrap();
    let mut content = Box::new([0; FRAME]);
    let first = u64::from(frames.read(0, &mut content).unwrap());
    let mut byte = [0];
    file.read_exact_at(&mut byte, first).unwrap();
    file.write_all_at(&[byte[0] ^ 1], first).unwrap();
    assert!(matches!(frames.read(1, &mut content), Err(FramesError::Damaged { frame: 1, .. })));
    for frame in [0, 2, 3, 4] {
        frames.read(frame, &mut content).unwrap();
    }
    file.set_len(first).unwrap();
    assert!(matches!(frames.read(3, &mut content), Err(FramesError::Damaged { frame: 3, reason: "the file is cut" })));
    assert!(matches!(frames.read(5, &mut content), Err(FramesError::NoFrame { frame: 5 })));
}

#[test]
fn refusals_are_typed() {
    let with = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = bytes_of(&sample().0);
        change(&mut bytes);
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&bytes, 0).unwrap();
        Frames::open(file).unwrap_err()
    };
    let tail = |bytes: &Vec<u8>| bytes.len() - TAIL;
    assert!(matches!(with(&|bytes| bytes.clear()), FramesError::Index { reason: "it is too short" }));
    assert!(matches!(
        with(&|bytes| {
            bytes.pop();
        }),
        FramesError::Index { reason: "its tail is not one" }
    ));
    let newer = with(&|bytes| {
        let at = tail(bytes) + 8;
        bytes[at] = 2;
    });
    assert!(matches!(newer, FramesError::Version { found: 2, supported: 1 }));
    assert!(matches!(
        with(&|bytes| {
            bytes.insert(0, 0);
        }),
        FramesError::Index { reason: "its frames are not all there" }
    ));
    let index = with(&|bytes| {
        let at = tail(bytes) - 1;
        bytes[at] ^= 1;
    });
    assert!(matches!(index, FramesError::Index { reason: "its index has another digest" }));

    for odd in [0, 1, FRAME as u64 + 1] {
        let file = tempfile::tempfile().unwrap();
        file.set_len(odd).unwrap();
        let refused = write_frames(&file, &tempfile::tempfile().unwrap());
        assert!(matches!(refused, Err(FramesError::Size { bytes }) if bytes == odd));
    }
}
