//! Kubernetes' rules for `$(VAR)` in commands, arguments and environment values: `$$` is a dollar
//! sign; unknown or unterminated references stay as written.

/// Replaces each `$(NAME)` that `lookup` knows; `None` if the result exceeds `most_bytes`.
pub(crate) fn expand<'a>(
    text: &str,
    lookup: impl Fn(&str) -> Option<&'a str>,
    most_bytes: usize,
) -> Option<String> {
    let mut out = String::new();
    let mut rest = text;
    // No reference ends behind one that does not end.
    let mut may_end = true;
    while let Some(dollar) = rest.find('$') {
        if out.len() > most_bytes {
            return None;
        }
        out.push_str(&rest[..dollar]);
        rest = &rest[dollar + 1..];
        if let Some(after) = rest.strip_prefix('$') {
            out.push('$');
            rest = after;
        } else if may_end && let Some((name, after)) = rest.strip_prefix('(').and_then(|r| r.split_once(')'))
        {
            match lookup(name) {
                Some(value) => out.push_str(value),
                None => {
                    out.push_str("$(");
                    out.push_str(name);
                    out.push(')');
                }
            }
            rest = after;
        } else {
            may_end &= !rest.starts_with('(');
            out.push('$');
        }
    }
    out.push_str(rest);
    (out.len() <= most_bytes).then_some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_examples_of_the_api_documentation_hold() {
        let lookup = |name: &str| match name {
            "A" => Some("1"),
            "EMPTY" => Some(""),
            _ => None,
        };
        for (text, expected) in [
            ("plain", "plain"),
            ("$(A)-$(A)", "1-1"),
            ("$(EMPTY)|", "|"),
            ("$(MISSING)", "$(MISSING)"),
            ("$$(A)", "$(A)"),
            ("$$$(A)", "$1"),
            ("$A $", "$A $"),
            ("$(A", "$(A"),
            ("$()", "$()"),
        ] {
            assert_eq!(expand(text, lookup, 10).as_deref(), Some(expected), "{text}");
        }
    }

    #[test]
    fn expansion_stops_at_its_limit() {
        let long = "x".repeat(100);
        let lookup = |_: &str| Some(long.as_str());
        assert_eq!(expand("$(A)$(A)", lookup, 200).map(|text| text.len()), Some(200));
        assert_eq!(expand("$(A)$(A)", lookup, 199), None);
        assert_eq!(expand(&"$(A)".repeat(1_000_000), lookup, 1000), None);
    }
}
