//! What can still be read of a record that was cut or altered: its parts are looked for by their names, since what is around them may be anything.

use std::str::FromStr;

use serde::de::DeserializeOwned;

use crate::{Process, Template, store::Named};

/// What stands behind a name, if it stands there once and is whole.
fn part<T: DeserializeOwned>(text: &str, name: &str) -> Option<T> {
    let name = format!("\"{name}\":");
    let mut found = text.split(&name).skip(1);
    let (behind, None) = (found.next()?, found.next()) else { return None };
    let mut values = serde_json::Deserializer::from_str(behind).into_iter();
    values.next()?.ok()
}

/// A column's text if it is one of these, or else that of the record's part of this name, if it is one; else the column's, as it is.
pub(super) fn or<T: FromStr>(column: &str, text: &str, name: &str) -> String {
    let is_one = |text: &str| text.parse::<T>().is_ok();
    if is_one(column) {
        return column.to_owned();
    }
    part::<String>(text, name).filter(|found| is_one(found)).unwrap_or_else(|| column.to_owned())
}

pub(super) fn template(text: &str) -> Option<Template> {
    part(text, "template")
}

/// A record has no process where it has no owner, or an owner without.
pub(super) fn process(text: &str) -> Named {
    match (part::<Option<Process>>(text, "process"), part::<Option<()>>(text, "owner")) {
        (Some(Some(process)), _) => Named::Process(process),
        (Some(None), _) | (None, Some(None)) => Named::Nothing,
        _ => Named::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Tenant;

    #[test]
    fn a_part_is_read_wherever_the_damage_is_not() {
        let known = Named::Process(Process { pid: 7, started: 9 });
        let process_is = r#""process":{"pid":7,"started":9}"#;
        for (text, named) in [
            (format!(r#"{{"facts":{{"owner":{{"node":"local",{process_is},"lease_until":null}}}}}}"#), known),
            (format!(r#"\u{{fffd}}{{{{ {process_is} and no more"#), known),
            (r#"{"owner":{"node":"local","process":null}}"#.into(), Named::Nothing),
            (r#"{"version":1,"facts":{"owner":null,"life"#.into(), Named::Nothing),
            (r#"{"owner":{"node":"local","process":{"pid":7,"sta"#.into(), Named::Unknown),
            (r#"{"version":1,"id":"sb-1""#.into(), Named::Unknown),
            (format!("{process_is} {process_is}"), Named::Unknown),
            (String::new(), Named::Unknown),
        ] {
            assert_eq!(process(&text), named, "{text}");
        }
        let record = r#"{"version":1,"id":"sb-1","tenant":"a","state"#;
        for (column, found) in [("b", "b"), ("", "a"), ("?!", "a")] {
            assert_eq!(or::<Tenant>(column, record, "tenant"), found);
        }
        assert_eq!(or::<Tenant>("?!", r#"{"tenant":"#, "tenant"), "?!");
        let whole = template(r#"{"template":{"name":"x","version":"v1"},"state""#).unwrap();
        assert_eq!((whole.name.as_str(), whole.version.as_str()), ("x", "v1"));
        assert_eq!(template(r#"{"template":{"name":"x","vers"#), None);
    }
}
