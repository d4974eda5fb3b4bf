//! Everything the server is built from has a licence that allows it to be passed on under Apache-2.0.

use std::process::Command;

/// Licences that ask for no more than to be named.
const ALLOWED: [&str; 13] = [
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "MIT-0",
    "OpenSSL",
    "Unicode-3.0",
    "Zlib",
];

#[test]
fn every_dependency_has_an_allowed_licence() {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let arguments =
        ["metadata", "--format-version", "1", "--locked", "--offline", "--filter-platform", "x86_64-unknown-linux-gnu"];
    let output = Command::new(cargo).args(arguments).current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    assert!(packages.len() > 50);
    let refused: Vec<_> = packages
        .iter()
        .filter(|package| !package["license"].as_str().is_some_and(is_allowed))
        .map(|package| format!("{} {}: {}", package["name"], package["version"], package["license"]))
        .collect();
    assert!(refused.is_empty(), "{}", refused.join("\n"));
}

#[test]
fn a_licence_expression_is_allowed_when_one_choice_of_it_is() {
    for allowed in
        ["MIT", "MIT/Apache-2.0", "GPL-3.0 OR MIT", "(MIT OR GPL-2.0) AND Unicode-3.0", "Apache-2.0 WITH LLVM-exception OR X"]
    {
        assert!(is_allowed(allowed), "{allowed}");
    }
    for refused in ["", "GPL-3.0", "MIT AND GPL-3.0", "(GPL-2.0 OR AGPL-3.0) AND MIT", "BUSL-1.1 OR SSPL-1.0"] {
        assert!(!is_allowed(refused), "{refused}");
    }
}

/// AND binds closer than OR; a group in parentheses stands for one term. `/` is an old OR.
fn is_allowed(expression: &str) -> bool {
    let expression = expression.replace('/', " OR ");
    split(&expression, " OR ").iter().any(|choice| split(choice, " AND ").iter().all(|term| is_term_allowed(term.trim())))
}

fn is_term_allowed(term: &str) -> bool {
    match term.strip_prefix('(').and_then(|t| t.strip_suffix(')')) {
        Some(group) => is_allowed(group),
        None => ALLOWED.contains(&term),
    }
}

/// Splits where the separator stands outside of parentheses.
fn split<'e>(expression: &'e str, separator: &str) -> Vec<&'e str> {
    let (mut parts, mut depth, mut from, mut at) = (Vec::new(), 0, 0, 0);
    while at < expression.len() {
        match expression.as_bytes()[at] {
            b'(' => depth += 1,
            b')' => depth -= 1,
            _ if depth == 0 && expression[at..].starts_with(separator) => {
                parts.push(&expression[from..at]);
                from = at + separator.len();
            }
            _ => {}
        }
        at += 1;
    }
    parts.push(&expression[from..]);
    parts
}
