//! Signing in and out.

use askama::Template;
use http::{Method, StatusCode};

use super::{
    Console, Visit,
    exchange::{Answer, Ask, Failure, Frame, render, see_other},
    gate,
};

#[derive(Template)]
#[template(path = "login.html")]
struct Login<'a> {
    frame: Frame,
    next: &'a str,
    problem: Option<String>,
}

/// The form, or what becomes of it.
pub fn answer(console: &Console, ask: &Ask) -> Answer {
    let Some(operators) = &console.operators else { return see_other("/") };
    let form = |status, next, problem| {
        let frame = console.frame("", "Sign in", None);
        render(status, &Login { frame, next: gate::next_page(next), problem })
    };
    if ask.method != Method::POST {
        return form(StatusCode::OK, ask.query.get("next").map_or("/", String::as_str), None);
    }
    let next = ask.field("next");
    if let Err(failure) = gate::check_origin(ask) {
        return form(failure.status, next, Some(failure.text));
    }
    if let Err(refusal) = operators.check(ask.field("password"), ask.peer) {
        tracing::warn!(peer = %ask.peer, "a wrong password was given to the console");
        let Failure { status, text } = gate::refused(refusal);
        return form(status, next, Some(text));
    }
    let token = operators.sign_in(ask.field("name"));
    let name = operators.of_session(&token).map(|operator| operator.name).unwrap_or_default();
    tracing::info!(operator = name, peer = %ask.peer, "signed in to the console");
    let mut answer = see_other(gate::next_page(next));
    gate::set_session(&mut answer, &token, &ask.headers);
    answer
}

/// Ends the session.
pub fn leave(visit: &Visit<'_>) -> Answer {
    if let (Some(operators), Some(token)) = (&visit.console.operators, gate::session(&visit.ask.headers)) {
        operators.sign_out(token);
    }
    let mut answer = see_other("/login");
    gate::set_session(&mut answer, "", &visit.ask.headers);
    answer
}
