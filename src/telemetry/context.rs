//! Which span a call or a message belongs to, as the W3C's Trace Context writes it.

/// The attribute in which Google's clients write the context that a message was created in.
pub const CREATED_BY: &str = "googclient_traceparent";

/// Length of `00-{trace id}-{span id}-{flags}`.
const LENGTH: usize = 55;

/// A place in a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Context {
    pub trace_id: [u8; 16],
    pub span_id: [u8; 8],
    /// The trace is being recorded.
    pub sampled: bool,
}

tokio::task_local! {
    static PARENT: Context;
}

/// Runs a future as a part of what its caller does.
pub async fn under<F: Future>(parent: Option<Context>, future: F) -> F::Output {
    match parent {
        Some(parent) => PARENT.scope(parent, future).await,
        None => future.await,
    }
}

/// What the caller said this is a part of.
pub fn parent() -> Option<Context> {
    PARENT.try_with(|parent| *parent).ok()
}

impl Context {
    /// Reads a `traceparent`. What is none is passed over, as the standard asks.
    pub fn parse(text: &str) -> Option<Self> {
        let (known, rest) = text.as_bytes().split_at_checked(LENGTH)?;
        let [version, trace_id, span_id, flags] =
            <[&[u8]; 4]>::try_from(known.split(|byte| *byte == b'-').collect::<Vec<_>>()).ok()?;
        let version = hex::<1>(version)?[0];
        // Later versions may go on after a hyphen; 255 is forbidden.
        let whole = if version == 0 { rest.is_empty() } else { rest.is_empty() || rest[0] == b'-' };
        let (trace_id, span_id, flags) = (hex::<16>(trace_id)?, hex::<8>(span_id)?, hex::<1>(flags)?[0]);
        (whole && version != 255 && trace_id != [0; 16] && span_id != [0; 8]).then_some(Self {
            trace_id,
            span_id,
            sampled: flags & 1 == 1,
        })
    }

    /// A trace that begins here.
    pub(super) fn root(sampled: bool) -> Self {
        Self { trace_id: random(), span_id: random(), sampled }
    }

    /// A span below this one.
    pub(super) fn child(&self) -> Self {
        Self { span_id: random(), ..*self }
    }

    /// The text of a `traceparent`.
    pub fn traceparent(&self) -> String {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        format!("00-{}-{}-{:02x}", hex(&self.trace_id), hex(&self.span_id), u8::from(self.sampled))
    }
}

/// Random bytes that are not all zero, which would be no id.
fn random<const N: usize>() -> [u8; N]
where
    [u8; N]: Default,
    rand::distr::StandardUniform: rand::distr::Distribution<[u8; N]>,
{
    loop {
        let id: [u8; N] = rand::random();
        if id.iter().any(|byte| *byte != 0) {
            return id;
        }
    }
}

/// Lower-case hexadecimal digits.
fn hex<const N: usize>(digits: &[u8]) -> Option<[u8; N]> {
    let value = |digit: u8| match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    };
    let mut bytes = [0; N];
    if digits.len() != 2 * N {
        return None;
    }
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = value(pair[0])? * 16 + value(pair[1])?;
    }
    Some(bytes)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const GOOD: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn a_traceparent_is_read_and_written() {
        let context = Context::parse(GOOD).unwrap();
        assert!(context.sampled);
        assert_eq!((context.trace_id[0], context.span_id[7]), (0x0a, 0x31));
        assert_eq!(context.traceparent(), GOOD);
        assert!(!Context::parse(&GOOD.replace("-01", "-00")).unwrap().sampled);
        // A later version with more at its end, and flags that are not known yet.
        assert!(Context::parse(&format!("{}-more", GOOD.replacen("00", "01", 1).replace("-01", "-ff"))).unwrap().sampled);
    }

    #[test]
    fn what_is_no_traceparent_is_passed_over() {
        let zeros = |count| "0".repeat(count);
        for text in [
            "",
            "x",
            &GOOD[..54],
            &format!("{GOOD}-more"),
            &format!("{GOOD}0"),
            &GOOD.replacen("00", "ff", 1),
            &GOOD.to_uppercase(),
            &GOOD.replace('-', "_"),
            &format!("00-{}-b7ad6b7169203331-01", zeros(32)),
            &format!("00-0af7651916cd43dd8448eb211c80319c-{}-01", zeros(16)),
            &format!("é{}", &GOOD[2..]),
        ] {
            assert_eq!(Context::parse(text), None, "{text}");
        }
    }

    #[tokio::test]
    async fn a_future_knows_what_it_is_a_part_of() {
        let context = Context::parse(GOOD).unwrap();
        assert_eq!(under(Some(context), async { parent() }).await, Some(context));
        assert_eq!(under(None, async { parent() }).await, None);
        let child = context.child();
        assert_eq!((child.trace_id, child.sampled), (context.trace_id, true));
        assert_ne!(child.span_id, context.span_id);
    }
}
