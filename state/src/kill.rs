//! Deleting succeeds from every state, however many others change the record meanwhile, and twice too.

use crate::{Event, Record, SandboxId, State, Store, StoreError, Timestamp};

/// Writes down that a sandbox is to be removed, and returns its record; none if there is nothing to remove. From then on nothing
/// brings it back, and its owner removes it.
///
/// # Errors
/// [`StoreError::Unavailable`] if the store cannot be written, [`StoreError::Corrupt`] if the record cannot be read.
pub async fn begin_kill(store: &dyn Store, id: &SandboxId) -> Result<Option<Record>, StoreError> {
    loop {
        let record = match store.get(id).await {
            Ok(record) if record.state() == State::Killing => return Ok(Some(record)),
            Ok(record) => record,
            Err(StoreError::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(error),
        };
        let Ok(change) = record.on(Event::Kill, Timestamp::now()) else { return Ok(None) };
        match store.commit(change).await {
            Ok(record) => return Ok(Some(record)),
            // Somebody was faster: what they wrote can be killed too. Each round is another's success, so this comes to an end.
            Err(StoreError::Conflict { .. }) => {}
            Err(StoreError::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(error),
        }
    }
}
