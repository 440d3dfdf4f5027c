//! Values as protobuf's JSON has them: null is absent, numbers may be text, bytes are base64 of either alphabet.

use base64::{
    Engine, alphabet,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};
use serde::{Deserialize, Deserializer, de::Error};

const LENIENT: GeneralPurposeConfig = GeneralPurposeConfig::new()
    .with_decode_padding_mode(DecodePaddingMode::Indifferent)
    .with_decode_allow_trailing_bits(true);
const STANDARD: GeneralPurpose = GeneralPurpose::new(&alphabet::STANDARD, LENIENT);
const URL_SAFE: GeneralPurpose = GeneralPurpose::new(&alphabet::URL_SAFE, LENIENT);

/// null as the default.
pub(crate) fn default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(from: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

/// uint32, as a number or as text.
pub(crate) fn number<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected a number from 0 to 4294967295")]
    enum Number {
        Number(u32),
        Text(String),
    }
    match Option::deserialize(from)? {
        None => Ok(None),
        Some(Number::Number(number)) => Ok(Some(number)),
        Some(Number::Text(text)) => {
            text.parse().map(Some).map_err(|_| D::Error::custom("expected a number from 0 to 4294967295"))
        }
    }
}

/// bytes.
pub(crate) fn bytes<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Vec<u8>>, D::Error> {
    let Some(text) = Option::<String>::deserialize(from)? else { return Ok(None) };
    let engine = if text.contains(['-', '_']) { &URL_SAFE } else { &STANDARD };
    engine.decode(text).map(Some).map_err(|_| D::Error::custom("expected base64"))
}
