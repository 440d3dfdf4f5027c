//! Records as bytes: JSON, so that a person can read a store with its own tool.

use serde::Deserialize;

use super::Record;

/// The form of records that this build writes, and the only one that it reads.
pub const RECORD_VERSION: u32 = 1;

/// Why bytes are not a record.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// Another build wrote it in another form.
    #[error("the record has version {found}, and this build reads {RECORD_VERSION}: use the build that wrote it")]
    Version {
        /// Its version.
        found: u32,
    },
    /// It was altered or cut, or holds a field that this version does not have.
    #[error("the record cannot be read")]
    Form(#[source] serde_json::Error),
}

impl Record {
    /// As bytes.
    ///
    /// # Errors
    /// None that is known: all its parts have a form in JSON.
    pub fn encode(&self) -> Result<String, serde_json::Error> {
        serde_json::to_string(self)
    }

    /// From bytes.
    ///
    /// # Errors
    /// [`DecodeError`] for anything that is not a whole record of this version.
    pub fn decode(text: &str) -> Result<Self, DecodeError> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let Versioned { version } = serde_json::from_str(text).map_err(DecodeError::Form)?;
        if version != RECORD_VERSION {
            return Err(DecodeError::Version { found: version });
        }
        serde_json::from_str(text).map_err(DecodeError::Form)
    }
}
