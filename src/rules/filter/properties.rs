//! The parser and the evaluator against an independent reading of the grammar.

use std::collections::HashMap;

use proptest::prelude::*;

use super::Filter;
use crate::model::EncodedMessage;

/// The reference: a tree, evaluated by recursion over a map.
#[derive(Debug, Clone)]
enum Tree {
    Has(String),
    Equals(String, String),
    Differs(String, String),
    HasPrefix(String, String),
    Not(Box<Tree>),
    And(Vec<Tree>),
    Or(Vec<Tree>),
}

impl Tree {
    fn holds(&self, attributes: &HashMap<&str, &str>) -> bool {
        match self {
            Tree::Has(key) => attributes.contains_key(key.as_str()),
            Tree::Equals(key, value) => attributes.get(key.as_str()) == Some(&value.as_str()),
            Tree::Differs(key, value) => attributes.get(key.as_str()) != Some(&value.as_str()),
            Tree::HasPrefix(key, prefix) => attributes.get(key.as_str()).is_some_and(|v| v.starts_with(prefix.as_str())),
            Tree::Not(inner) => !inner.holds(attributes),
            Tree::And(all) => all.iter().all(|t| t.holds(attributes)),
            Tree::Or(any) => any.iter().any(|t| t.holds(attributes)),
        }
    }
}

/// A source of choices for the rendering; runs round.
struct Dice<'a> {
    rolls: &'a [u8],
    at: usize,
}

impl Dice<'_> {
    fn roll(&mut self, sides: u8) -> u8 {
        self.at += 1;
        self.rolls[self.at % self.rolls.len()] % sides
    }

    fn space(&mut self) -> &'static str {
        ["", "", "", " ", "\n"][self.roll(5) as usize]
    }

    fn gap(&mut self) -> &'static str {
        [" ", " ", "\t"][self.roll(3) as usize]
    }
}

fn quote(text: &str, dice: &mut Dice<'_>) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match (c, dice.roll(8)) {
            ('"' | '\\', _) => out.extend(['\\', c]),
            (c, 0) if u32::from(c) < 0x100 => out += &format!("\\x{:02x}", u32::from(c)),
            (c, 1) if u32::from(c) < 0x100 => out += &format!("\\{:03o}", u32::from(c)),
            (c, 2) => c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| out += &format!("\\u{unit:04X}")),
            (c, _) => out.push(c),
        }
    }
    out + "\""
}

fn key(text: &str, dice: &mut Dice<'_>) -> String {
    let bare = !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || "_-".contains(c));
    if bare && dice.roll(4) > 0 { text.to_owned() } else { quote(text, dice) }
}

/// Writes an operand: anything that is not a plain test goes into parentheses, and anything may.
fn operand(tree: &Tree, dice: &mut Dice<'_>) -> String {
    let joined = matches!(tree, Tree::And(_) | Tree::Or(_));
    if joined || dice.roll(6) == 0 {
        format!("({}{}{})", dice.space(), render(tree, dice), dice.space())
    } else {
        render(tree, dice)
    }
}

fn render(tree: &Tree, dice: &mut Dice<'_>) -> String {
    let (a, b) = (dice.space(), dice.space());
    match tree {
        Tree::Has(k) => format!("attributes{a}:{b}{}", key(k, dice)),
        Tree::Equals(k, v) => format!("attributes.{a}{} {b}={a}{}", key(k, dice), quote(v, dice)),
        Tree::Differs(k, v) => format!("attributes{b}.{} !={a}{}", key(k, dice), quote(v, dice)),
        Tree::HasPrefix(k, v) => format!("hasPrefix{a}({b}attributes.{}{a},{b}{}{a})", key(k, dice), quote(v, dice)),
        Tree::Not(inner) => {
            let inner = match **inner {
                // A negation is not repeated without parentheses.
                Tree::Not(_) => format!("({})", render(inner, dice)),
                _ => operand(inner, dice),
            };
            if dice.roll(2) == 0 { format!("-{a}{inner}") } else { format!("NOT{}{inner}", dice.gap()) }
        }
        Tree::And(parts) => join(parts, "AND", dice),
        Tree::Or(parts) => join(parts, "OR", dice),
    }
}

fn join(parts: &[Tree], operator: &str, dice: &mut Dice<'_>) -> String {
    let mut out = operand(&parts[0], dice);
    for part in &parts[1..] {
        out += &format!("{}{operator}{}{}", dice.gap(), dice.gap(), operand(part, dice));
    }
    out
}

fn any_text() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => prop::sample::select(vec!["", "a", "b", "ab", "a-b", "1", "NOT", "x y"]).prop_map(str::to_owned),
        1 => "[a\"\\\\é€😀\u{0}\n]{0,3}",
    ]
}

fn any_tree() -> impl Strategy<Value = Tree> {
    let test = prop_oneof![
        any_text().prop_map(Tree::Has),
        (any_text(), any_text()).prop_map(|(k, v)| Tree::Equals(k, v)),
        (any_text(), any_text()).prop_map(|(k, v)| Tree::Differs(k, v)),
        (any_text(), any_text()).prop_map(|(k, v)| Tree::HasPrefix(k, v)),
    ];
    test.prop_recursive(4, 10, 3, |inner| {
        prop_oneof![
            inner.clone().prop_map(|t| Tree::Not(Box::new(t))),
            prop::collection::vec(inner.clone(), 2..4).prop_map(Tree::And),
            prop::collection::vec(inner, 2..4).prop_map(Tree::Or),
        ]
    })
}

/// Bits of filters, in an order that makes no sense most of the time.
fn any_jumble() -> impl Strategy<Value = String> {
    let tokens = vec![
        "attributes",
        "hasPrefix",
        "NOT",
        "AND",
        "OR",
        "-",
        "(",
        ")",
        ":",
        ".",
        "=",
        "!=",
        ",",
        " ",
        "\"",
        "\\",
        "\"x\"",
        "k",
        "\\u12",
        "attributes:a",
        "attributes.a=\"1\"",
        "é",
        "\u{0}",
    ];
    prop::collection::vec(prop::sample::select(tokens), 0..24).prop_map(|tokens| tokens.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn a_rendered_tree_is_parsed_to_the_same_meaning(
        tree in any_tree(),
        rolls in prop::collection::vec(any::<u8>(), 1..40),
        messages in prop::collection::vec(prop::collection::vec((any_text(), any_text()), 0..5), 1..8),
    ) {
        let text = render(&tree, &mut Dice { rolls: &rolls, at: 0 });
        prop_assume!(text.len() <= 256);
        let filter = Filter::parse(&text).map_err(|e| TestCaseError::fail(format!("{text}: {e}")))?;
        for message in &messages {
            let pairs = || message.iter().map(|(k, v)| (k.as_str(), v.as_str()));
            let encoded = EncodedMessage::encode(b"x", pairs(), "");
            prop_assert_eq!(filter.matches(&encoded), tree.holds(&pairs().collect()), "{} on {:?}", text, message);
        }
    }

    #[test]
    fn any_text_is_parsed_or_refused_at_a_place_inside_it(text in prop_oneof![any::<String>(), any_jumble(), ".{0,300}"]) {
        if let Err(error) = Filter::parse(&text) {
            prop_assert!(error.position() <= text.len());
            prop_assert!(text.is_char_boundary(error.position()) || text.len() > 256);
            prop_assert!(!error.to_string().is_empty());
        }
    }
}
