//! Messages in Avro's binary encoding: one value of the schema and nothing after it.
//!
//! Reading keeps its own stack, so that a message can't exhaust the thread's, and counts values, so that a few bytes can't
//! stand for endless work (an array of a billion nulls takes eight bytes).

use std::str;

use super::{Schema, Type, TypeId};

/// Values inside each other, enough for a linked list of thousands; keeps the stack of open values below 500 KB.
const MAX_DEPTH: usize = 10_000;
/// Values a message may hold beyond what its size explains.
const FREE_VALUES: usize = 10_000;
/// Values that each byte of a message pays for: most take a byte or more, records around them take none.
const VALUES_PER_BYTE: usize = 64;

type Result<T> = std::result::Result<T, String>;

/// A value that has been begun.
enum Open {
    Record {
        id: TypeId,
        next: usize,
    },
    /// An array or a map, somewhere in a block.
    Items {
        items: TypeId,
        keyed: bool,
        left: u64,
        block_end: Option<usize>,
    },
}

pub(super) fn validate(schema: &Schema, data: &[u8]) -> Result<()> {
    let mut input = Input { data, at: 0 };
    let mut budget = data.len().saturating_mul(VALUES_PER_BYTE).saturating_add(FREE_VALUES);
    let mut open = Vec::new();
    let mut next = Some(schema.root);
    loop {
        if let Some(id) = next {
            budget = budget.checked_sub(1).ok_or("more values than a message of its size may hold")?;
            next = begin(schema, id, &mut input, &mut open)?;
            if open.len() > MAX_DEPTH {
                return Err(format!("values nest deeper than {MAX_DEPTH} levels"));
            }
            continue;
        }
        let Some(innermost) = open.last_mut() else { break };
        match go_on(schema, innermost, &mut input)? {
            Some(id) => next = Some(id),
            None => drop(open.pop()),
        }
    }
    match data.len() - input.at {
        0 => Ok(()),
        extra => Err(format!("Too much data to parse for schema: {extra} bytes after the value")),
    }
}

/// Reads a whole simple value, or the start of another. Answers the value that follows at once, the branch of a union.
fn begin(schema: &Schema, id: TypeId, input: &mut Input<'_>, open: &mut Vec<Open>) -> Result<Option<TypeId>> {
    match schema.get(id) {
        Type::Null => {}
        Type::Boolean => match input.take(1)? {
            [0 | 1] => {}
            _ => return Err(input.error("a boolean is neither 0 nor 1")),
        },
        Type::Int => drop(input.int()?),
        Type::Long => drop(input.long()?),
        Type::Float => drop(input.take(4)?),
        Type::Double => drop(input.take(8)?),
        Type::Bytes { .. } => drop(input.block()?),
        Type::String => input.text()?,
        Type::Fixed { size, .. } => drop(input.take(*size)?),
        Type::Enum(symbols) => {
            let index = input.int()?;
            if !(0..symbols.symbols.len() as i64).contains(&index) {
                return Err(input.error(&format!("{} has no symbol number {index}", symbols.name.full)));
            }
        }
        Type::Union(union) => {
            let index = input.long()?;
            let branch = usize::try_from(index).ok().and_then(|index| union.branches.get(index));
            return branch.copied().map(Some).ok_or_else(|| input.error(&format!("the union has no branch number {index}")));
        }
        Type::Array(items) => open.push(Open::Items { items: *items, keyed: false, left: 0, block_end: None }),
        Type::Map(values) => open.push(Open::Items { items: *values, keyed: true, left: 0, block_end: None }),
        Type::Record(_) => open.push(Open::Record { id, next: 0 }),
    }
    Ok(None)
}

/// Answers the next value inside `open`; `None` when there are no more.
fn go_on(schema: &Schema, open: &mut Open, input: &mut Input<'_>) -> Result<Option<TypeId>> {
    match open {
        Open::Record { id, next } => {
            let Type::Record(record) = schema.get(*id) else { return Ok(None) };
            *next += 1;
            Ok(record.fields.get(*next - 1).map(|field| field.schema))
        }
        Open::Items { items, keyed, left, block_end } => {
            if *left == 0 {
                if block_end.is_some_and(|end| end != input.at) {
                    return Err(input.error("a block is not as long as it says"));
                }
                (*left, *block_end) = input.block_header()?;
                if *left == 0 {
                    return Ok(None);
                }
            }
            *left -= 1;
            if *keyed {
                input.text()?;
            }
            Ok(Some(*items))
        }
    }
}

struct Input<'a> {
    data: &'a [u8],
    at: usize,
}

impl<'a> Input<'a> {
    fn error(&self, text: &str) -> String {
        format!("{text} (at byte {})", self.at)
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8]> {
        let end = self.at.checked_add(length).filter(|end| *end <= self.data.len());
        let end =
            end.ok_or_else(|| self.error(&format!("{length} bytes are expected, {} are left", self.data.len() - self.at)))?;
        let taken = &self.data[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn varint(&mut self, max_bytes: usize) -> Result<u64> {
        let mut value = 0u64;
        for index in 0..max_bytes {
            let byte = self.take(1)?[0];
            // The tenth byte has room for one bit.
            if index == 9 && byte > 1 {
                break;
            }
            value |= u64::from(byte & 0x7f) << (7 * index);
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(self.error("a number is too long"))
    }

    fn long(&mut self) -> Result<i64> {
        self.varint(10).map(unzigzag)
    }

    fn int(&mut self) -> Result<i64> {
        let value = unzigzag(self.varint(5)?);
        i32::try_from(value).map(i64::from).map_err(|_| self.error(&format!("{value} does not fit an int")))
    }

    /// Reads bytes with their length before them.
    fn block(&mut self) -> Result<&'a [u8]> {
        let length = self.long()?;
        self.take(usize::try_from(length).map_err(|_| self.error(&format!("{length} is not a length")))?)
    }

    fn text(&mut self) -> Result<()> {
        let bytes = self.block()?;
        str::from_utf8(bytes).map(drop).map_err(|_| self.error("a string is not UTF-8"))
    }

    /// Reads how many items follow and, if that is given, where they end.
    fn block_header(&mut self) -> Result<(u64, Option<usize>)> {
        let count = self.long()?;
        if count >= 0 {
            return Ok((count as u64, None));
        }
        let length = self.long()?;
        let end = usize::try_from(length).ok().and_then(|length| self.at.checked_add(length));
        let end = end.filter(|end| *end <= self.data.len());
        let end = end.ok_or_else(|| self.error(&format!("a block can't be {length} bytes long")))?;
        Ok((count.unsigned_abs(), Some(end)))
    }
}

fn unzigzag(value: u64) -> i64 {
    (value >> 1) as i64 ^ -((value & 1) as i64)
}
