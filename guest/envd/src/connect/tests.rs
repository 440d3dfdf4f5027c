use axum::body::Body;
use serde::Deserialize;

use super::{frame::LARGEST, *};

#[derive(Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
struct Message {
    #[serde(deserialize_with = "value::default")]
    text: String,
    #[serde(deserialize_with = "value::number")]
    number: Option<u32>,
    #[serde(deserialize_with = "value::bytes")]
    bytes: Option<Vec<u8>>,
}

#[test]
fn values_are_read_as_protobuf_reads_them() {
    for (json, wanted) in [
        ("{}", Message::default()),
        (r#"{"text":null,"number":null,"bytes":null,"unknown":{"a":[1]}}"#, Message::default()),
        (r#"{"number":"42"}"#, Message { number: Some(42), ..Message::default() }),
        (r#"{"number":42,"text":"a"}"#, Message { number: Some(42), text: "a".into(), ..Message::default() }),
        (r#"{"bytes":"+/8="}"#, Message { bytes: Some(vec![0xfb, 0xff]), ..Message::default() }),
        (r#"{"bytes":"-_8"}"#, Message { bytes: Some(vec![0xfb, 0xff]), ..Message::default() }),
    ] {
        assert_eq!(parse::<Message>(json.as_bytes()).unwrap(), wanted, "{json}");
    }
    for json in [
        "",
        "[]x",
        r#"{"number":-1}"#,
        r#"{"number":4294967296}"#,
        r#"{"bytes":"?"}"#,
        r#"{"text":1}"#,
        "{\"text\":\"\u{0}\"}",
    ] {
        assert_eq!(parse::<Message>(json.as_bytes()).unwrap_err().code, Code::InvalidArgument, "{json}");
    }
    assert_eq!(parse::<Message>(b"{\"text\":\"\xff\"}").unwrap_err().code, Code::InvalidArgument);
}

#[test]
fn frames_are_what_the_wire_has() {
    assert_eq!(&message(&serde_json::json!({"a": 1}))[..], b"\x00\x00\x00\x00\x07{\"a\":1}");
    assert_eq!(&end(None)[..], b"\x02\x00\x00\x00\x02{}");
    let error = RpcError::new(Code::NotFound, "gone");
    assert_eq!(
        &end(Some(&error))[..],
        b"\x02\x00\x00\x00\x2f{\"error\":{\"code\":\"not_found\",\"message\":\"gone\"}}"
    );
}

/// Cut at every place.
#[tokio::test]
async fn messages_are_found_however_they_arrive() {
    let wire = [&message(&1)[..], &message(&"two"), &message(&())].concat();
    for cut in 0..wire.len() {
        let parts = [wire[..cut].to_vec(), wire[cut..].to_vec()].map(Ok::<_, std::convert::Infallible>);
        let mut frames = Frames::new(Body::from_stream(futures_util::stream::iter(parts)));
        for wanted in [&b"1"[..], b"\"two\"", b"null"] {
            assert_eq!(frames.next().await.unwrap().unwrap(), wanted, "cut at {cut}");
        }
        assert_eq!(frames.next().await, Ok(None));
    }
}

#[tokio::test]
async fn frames_that_are_not_whole_or_not_ours_are_refused() {
    let too_long = u32::try_from(LARGEST + 1).unwrap().to_be_bytes();
    for (wire, code) in [
        (vec![0, 0, 0], Code::InvalidArgument),
        (vec![0, 0, 0, 0, 9, b'{'], Code::InvalidArgument),
        (vec![1, 0, 0, 0, 1, b'{'], Code::Internal),
        (vec![8, 0, 0, 0, 1, b'{'], Code::InvalidArgument),
        ([&[0][..], &too_long].concat(), Code::ResourceExhausted),
    ] {
        assert_eq!(Frames::new(Body::from(wire.clone())).next().await.unwrap_err().code, code, "{wire:?}");
    }
}
