//! `$(VAR)` in commands, arguments and environment values, with Kubernetes'
//! rules: `$$` is a dollar sign, what is unknown or unfinished stays as written.

/// Replaces each `$(NAME)` that `lookup` knows.
pub(crate) fn expand<'a>(text: &str, lookup: impl Fn(&str) -> Option<&'a str>) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(dollar) = rest.find('$') {
        out.push_str(&rest[..dollar]);
        rest = &rest[dollar + 1..];
        if let Some(after) = rest.strip_prefix('$') {
            out.push('$');
            rest = after;
        } else if let Some((name, after)) = rest.strip_prefix('(').and_then(|r| r.split_once(')')) {
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
            out.push('$');
        }
    }
    out.push_str(rest);
    out
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
            assert_eq!(expand(text, lookup), expected, "{text}");
        }
    }
}
