//! From a template's text to its parts.

use serde_json::Value;

use super::{Filter, Operand, Operator, Part, Path, Step};

/// Ranges, and filters and unions, in each other.
const DEPTH: usize = 32;

type Parsed<T> = Result<T, String>;

/// A range that has begun.
struct Open {
    over: Path,
    before: Vec<Part>,
}

pub(super) fn template(text: &str) -> Parsed<Vec<Part>> {
    let mut parts = Vec::new();
    let mut open: Vec<Open> = Vec::new();
    let mut rest = text;
    while let Some((before, inside)) = rest.split_once('{') {
        if !before.is_empty() {
            parts.push(Part::Text(before.to_owned()));
        }
        let mut reader = Reader { rest: inside, depth: 0 };
        loop {
            reader.skip_blanks();
            if reader.eat("}") {
                break;
            }
            if reader.eat_word("range") {
                reader.skip_blanks();
                if open.len() == DEPTH {
                    return Err(format!("more than {DEPTH} ranges in each other"));
                }
                open.push(Open { over: reader.path()?, before: std::mem::take(&mut parts) });
            } else if reader.eat_word("end") {
                let Open { over, before } = open.pop().ok_or("not in range")?;
                let body = std::mem::replace(&mut parts, before);
                parts.push(Part::Range { over, body });
            } else {
                match reader.peek() {
                    None => return Err("unclosed action".to_owned()),
                    Some('"' | '\'') => parts.push(Part::Text(reader.quoted()?)),
                    Some('.' | '$' | '@' | '[') => parts.push(Part::Path(reader.path()?)),
                    Some(letter) if letter.is_alphanumeric() => parts.push(Part::Path(reader.bare_path()?)),
                    Some(letter) => return Err(format!("unrecognized character in action: {letter:?}")),
                }
            }
        }
        rest = reader.rest;
    }
    if !open.is_empty() {
        return Err("unmatched range: no end".to_owned());
    }
    if !rest.is_empty() {
        parts.push(Part::Text(rest.to_owned()));
    }
    Ok(parts)
}

struct Reader<'a> {
    rest: &'a str,
    depth: usize,
}

impl<'a> Reader<'a> {
    fn peek(&self) -> Option<char> {
        self.rest.chars().next()
    }

    fn eat(&mut self, text: &str) -> bool {
        match self.rest.strip_prefix(text) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    /// Not as the begin of a longer word.
    fn eat_word(&mut self, word: &str) -> bool {
        let ends = |rest: &str| !rest.starts_with(|next: char| next.is_alphanumeric());
        self.rest.strip_prefix(word).is_some_and(ends) && self.eat(word)
    }

    fn skip_blanks(&mut self) {
        self.rest = self.rest.trim_start();
    }

    /// Takes the letters for which `wanted` holds.
    fn take_while(&mut self, wanted: impl Fn(char) -> bool) -> &'a str {
        let end = self.rest.find(|letter| !wanted(letter)).unwrap_or(self.rest.len());
        let (taken, rest) = self.rest.split_at(end);
        self.rest = rest;
        taken
    }

    /// `name.other`: the first dot is missing.
    fn bare_path(&mut self) -> Parsed<Path> {
        let first = Step::Field(self.name());
        let mut path = vec![first];
        path.extend(self.path()?);
        Ok(path)
    }

    /// Ends before the first letter that does not continue the path.
    fn path(&mut self) -> Parsed<Path> {
        let mut path = Vec::new();
        if self.eat("$") {
            path.push(Step::Root);
        } else {
            self.eat("@");
        }
        loop {
            if self.eat("[") {
                path.push(self.subscript()?);
            } else if self.eat("..") {
                path.push(Step::Descendants);
                if self.peek().is_some_and(|next| next != '[') {
                    path.push(self.field());
                }
            } else if self.eat(".") {
                // A dot alone is the value itself: `{.}`.
                if self.peek().is_some_and(|next| !is_end(next)) {
                    path.push(self.field());
                }
            } else {
                return Ok(path);
            }
        }
    }

    fn field(&mut self) -> Step {
        if self.eat("*") { Step::All } else { Step::Field(self.name()) }
    }

    /// To the next letter with a meaning of its own; a backslash takes it away.
    fn name(&mut self) -> String {
        let mut name = String::new();
        let mut letters = self.rest.char_indices();
        let end = loop {
            match letters.next() {
                None => break self.rest.len(),
                Some((_, '\\')) => name.extend(letters.next().map(|(_, letter)| letter)),
                Some((at, letter)) if is_end(letter) || letter == '.' => break at,
                Some((_, letter)) => name.push(letter),
            }
        };
        self.rest = &self.rest[end..];
        name
    }

    /// Behind `[`.
    fn subscript(&mut self) -> Parsed<Step> {
        self.depth += 1;
        if self.depth > DEPTH {
            return Err(format!("more than {DEPTH} brackets in each other"));
        }
        let step = if self.eat("?(") {
            let filter = self.filter()?;
            self.skip_blanks();
            if !self.eat(")") {
                return match self.rest.split_once(')') {
                    Some((text, _)) if !text.contains(']') => {
                        Err(format!("unrecognized text in a filter: {}", text.trim()))
                    }
                    _ => Err("unterminated filter".to_owned()),
                };
            }
            Step::Filter(Box::new(filter))
        } else {
            let mut steps = vec![self.element()?];
            self.skip_blanks();
            while self.eat(",") {
                steps.push(self.element()?);
                self.skip_blanks();
            }
            match steps.len() {
                1 => steps.remove(0),
                _ => Step::Union(steps.into_iter().map(|step| vec![step]).collect()),
            }
        };
        self.skip_blanks();
        if !self.eat("]") {
            return Err("unterminated array".to_owned());
        }
        self.depth -= 1;
        Ok(step)
    }

    /// `*`, a name in quotes, a number, or a slice.
    fn element(&mut self) -> Parsed<Step> {
        self.skip_blanks();
        if self.eat("*") {
            return Ok(Step::All);
        }
        if self.peek() == Some('\'') || self.peek() == Some('"') {
            return Ok(Step::Field(self.quoted()?));
        }
        let text = self.take_while(|letter| !matches!(letter, ']' | ',' | '}' | '[')).trim();
        let number = |text: &str| match text.trim() {
            "" => Ok(None),
            text => text.parse::<i64>().map(Some).map_err(|_| format!("invalid array index {text}")),
        };
        let mut bounds = text.split(':');
        let (from, to, step) = (bounds.next().unwrap_or_default(), bounds.next(), bounds.next());
        if bounds.next().is_some() {
            return Err(format!("invalid array index {text}"));
        }
        match (number(from)?, to) {
            (Some(index), None) => Ok(Step::Index(index)),
            (None, None) => Err("an empty array index".to_owned()),
            (from, Some(to)) => {
                let step = number(step.unwrap_or_default())?.unwrap_or(1);
                let step = usize::try_from(step).ok().filter(|step| *step > 0);
                let step = step.ok_or_else(|| format!("step must be > 0 in {text}"))?;
                Ok(Step::Slice { from, to: number(to)?, step })
            }
        }
    }

    /// Behind `[?(`, to the closing parenthesis.
    fn filter(&mut self) -> Parsed<Filter> {
        let left = self.operand()?;
        self.skip_blanks();
        let operators = [
            ("==", Operator::Equal),
            ("!=", Operator::NotEqual),
            ("<=", Operator::LessOrEqual),
            (">=", Operator::GreaterOrEqual),
            ("<", Operator::Less),
            (">", Operator::Greater),
        ];
        match operators.into_iter().find(|(text, _)| self.eat(text)) {
            Some((_, operator)) => Ok(Filter { left, compared: Some((operator, self.operand()?)) }),
            None => Ok(Filter { left, compared: None }),
        }
    }

    fn operand(&mut self) -> Parsed<Operand> {
        self.skip_blanks();
        match self.peek() {
            Some('\'' | '"') => Ok(Operand::Constant(Value::String(self.quoted()?))),
            Some('.' | '@' | '$') => Ok(Operand::Path(self.path()?)),
            _ => {
                let text = self.take_while(|letter| letter.is_alphanumeric() || "+-._".contains(letter));
                match text {
                    "true" => Ok(Operand::Constant(true.into())),
                    "false" => Ok(Operand::Constant(false.into())),
                    "null" => Ok(Operand::Constant(Value::Null)),
                    text => {
                        let number = text.parse::<i64>().map(Value::from);
                        let number = number.or_else(|_| text.parse::<f64>().map(Value::from));
                        number.map(Operand::Constant).map_err(|_| match text {
                            "" => "unterminated filter".to_owned(),
                            text => format!("unrecognized text in a filter: {text}"),
                        })
                    }
                }
            }
        }
    }

    /// In either kind of quotes. `\n` and `\t` are what they are in Go.
    fn quoted(&mut self) -> Parsed<String> {
        let quote = self.peek().ok_or("unterminated quoted string")?;
        let mut text = String::new();
        let mut letters = self.rest[quote.len_utf8()..].chars();
        loop {
            match letters.next() {
                Some(letter) if letter == quote => {
                    self.rest = letters.as_str();
                    return Ok(text);
                }
                Some('\\') => match letters.next() {
                    Some('n') => text.push('\n'),
                    Some('t') => text.push('\t'),
                    Some('r') => text.push('\r'),
                    Some(letter) => text.push(letter),
                    None => return Err("unterminated quoted string".to_owned()),
                },
                Some(letter) => text.push(letter),
                None => return Err("unterminated quoted string".to_owned()),
            }
        }
    }
}

/// What a name in a path cannot contain without a backslash. A dot separates names.
fn is_end(letter: char) -> bool {
    letter.is_whitespace() || "[]{}()<>=!,\"'&|".contains(letter)
}
