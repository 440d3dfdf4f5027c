//! `stasis template build | list | remove`.

use std::{
    path::PathBuf,
    time::{Duration, UNIX_EPOCH},
};

use http::Method;
use serde::Deserialize;
use serde_json::Value;
use stasis_pool_api::{TemplateInfo, TemplateName};

use super::{
    Outcome, Terminal,
    answer::{ask, get, show},
    build,
    url::ApiUrl,
};

/// Characters of a digest that tell templates apart.
pub(super) const SHORT_DIGEST: usize = 12;

/// Templates: what functions are restored from.
#[derive(Debug, Clone, clap::Subcommand)]
pub(crate) enum TemplateCommand {
    /// Build a template from a folder that holds a template.toml
    Build {
        /// The folder
        dir: PathBuf,
        /// Print the build's events as JSON lines
        #[arg(long)]
        json: bool,
    },
    /// List the templates
    List {
        /// Print the gateway's JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove a template and its pool
    Remove {
        /// Its name
        name: TemplateName,
    },
}

#[derive(Deserialize)]
struct Listing {
    templates: Vec<TemplateInfo>,
}

pub(super) async fn run(url: &ApiUrl, command: TemplateCommand, terminal: &mut Terminal) -> anyhow::Result<Outcome> {
    match command {
        TemplateCommand::Build { dir, json } => build::run(url, &dir, json, terminal).await,
        TemplateCommand::List { json } => list(url, json, terminal).await,
        TemplateCommand::Remove { name } => remove(url, &name, terminal).await,
    }
}

async fn list(url: &ApiUrl, json: bool, terminal: &mut Terminal) -> anyhow::Result<Outcome> {
    let answer = get(url, "/v1/templates").await?;
    let mut is_empty = false;
    let shown = show(terminal, json, &answer, |Listing { templates }| {
        is_empty = templates.is_empty();
        table(&templates)
    });
    if is_empty {
        writeln!(terminal.err, "no templates yet: build one with `stasis template build DIR`")?;
    }
    shown
}

async fn remove(url: &ApiUrl, name: &TemplateName, terminal: &mut Terminal) -> anyhow::Result<Outcome> {
    ask(url, Method::DELETE, &format!("/v1/templates/{name}"), &Value::Null).await?;
    writeln!(terminal.err, "template {name} is removed")?;
    Ok(Outcome::Success)
}

fn table(templates: &[TemplateInfo]) -> String {
    let head = ["NAME", "DIGEST", "CPU", "MEMORY", "POOL", "MAX", "CREATED", "BUILT IN"].map(str::to_owned);
    let rows = templates.iter().map(|info| {
        let spec = &info.spec;
        [
            spec.name.to_string(),
            short(&info.digest).to_owned(),
            spec.cpu.to_string(),
            spec.memory.to_string(),
            spec.pool.min.to_string(),
            spec.pool.max.to_string(),
            humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(info.created_at)).to_string(),
            seconds(info.build_ms),
        ]
    });
    columns(&std::iter::once(head).chain(rows).collect::<Vec<_>>())
}

/// Rows with aligned columns.
pub(super) fn columns<const COLUMNS: usize>(rows: &[[String; COLUMNS]]) -> String {
    let mut text = String::new();
    for row in rows {
        for (column, cell) in row.iter().enumerate() {
            let width = rows.iter().map(|row| row[column].len()).max().unwrap_or_default();
            text.push_str(&format!("{cell:<width$}  "));
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
    }
    text
}

pub(super) fn short(digest: &str) -> &str {
    let hex = digest.rsplit(':').next().unwrap_or(digest);
    hex.get(..SHORT_DIGEST).unwrap_or(hex)
}

pub(super) fn seconds(millis: u64) -> String {
    format!("{:.1} s", Duration::from_millis(millis).as_secs_f64())
}

#[cfg(test)]
mod tests {
    use stasis_pool_api::TemplateSpec;

    use super::*;

    #[test]
    fn columns_are_aligned() {
        let info = |name: &str| TemplateInfo {
            spec: TemplateSpec::parse(&format!("name='{name}'\ncommand='x'")).unwrap(),
            digest: "sha256:0123456789abcdef".into(),
            created_at: 1_700_000_000,
            kernel_boot_id: String::new(),
            build_ms: 41_234,
            null_request_us: 0,
            memory_bytes: 0,
            made_with: stasis_pool_api::MadeWith::default(),
        };
        let table = table(&[info("a"), info("wordcount")]);
        let lines: Vec<_> = table.lines().collect();
        assert!(lines[1].starts_with("a          0123456789ab  1"), "{table}");
        assert!(lines[2].starts_with("wordcount  0123456789ab  1"), "{table}");
        assert!(lines[2].ends_with("2023-11-14T22:13:20Z  41.2 s"), "{table}");
    }
}
