//! What a registry asks for: the header `WWW-Authenticate` (RFC 9110, section 11.6.1).

/// One way to authenticate that a registry offers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Challenge {
    Basic,
    /// A token of the service at `realm` (distribution's "token authentication").
    Bearer {
        realm: String,
        service: Option<String>,
        scope: Option<String>,
    },
}

impl Challenge {
    /// Of the headers' values, Bearer before Basic. `None` if there is no other.
    pub(super) fn choose<'a>(headers: impl Iterator<Item = &'a str>) -> Option<Self> {
        let all: Vec<Self> = headers.flat_map(parse).collect();
        let bearer = all.iter().find(|challenge| matches!(challenge, Self::Bearer { .. }));
        bearer.or_else(|| all.first()).cloned()
    }
}

fn parse(header: &str) -> Vec<Challenge> {
    let mut found: Vec<(String, Vec<(String, String)>)> = Vec::new();
    let mut rest = header;
    loop {
        rest = rest.trim_start_matches([' ', '\t', ',']);
        let end = rest.find([' ', '\t', ',', '=']).unwrap_or(rest.len());
        let (token, after) = rest.split_at(end);
        if token.is_empty() {
            // The end, or a stray `=`, which belongs to a scheme of another form.
            match after.strip_prefix('=') {
                Some(after) => rest = after,
                None => break,
            }
            continue;
        }
        match after.trim_start().strip_prefix('=') {
            Some(after) => {
                let (value, after) = value(after.trim_start());
                if let Some((_, parameters)) = found.last_mut() {
                    parameters.push((token.to_ascii_lowercase(), value));
                }
                rest = after;
            }
            None => {
                found.push((token.to_ascii_lowercase(), Vec::new()));
                rest = after;
            }
        }
    }
    found.into_iter().filter_map(|(scheme, parameters)| understood(&scheme, parameters)).collect()
}

fn understood(scheme: &str, parameters: Vec<(String, String)>) -> Option<Challenge> {
    match scheme {
        "basic" => Some(Challenge::Basic),
        "bearer" => {
            let (mut realm, mut service, mut scope) = (None, None, None);
            for (name, value) in parameters {
                match name.as_str() {
                    "realm" => realm = Some(value),
                    "service" => service = Some(value),
                    "scope" => scope = Some(value),
                    _ => {}
                }
            }
            realm.map(|realm| Challenge::Bearer { realm, service, scope })
        }
        _ => None,
    }
}

/// A parameter's value, quoted or not, and what follows it.
fn value(text: &str) -> (String, &str) {
    let Some(quoted) = text.strip_prefix('"') else {
        let end = text.find([' ', '\t', ',']).unwrap_or(text.len());
        return (text[..end].to_owned(), &text[end..]);
    };
    let mut value = String::new();
    let mut letters = quoted.char_indices();
    while let Some((at, letter)) = letters.next() {
        match letter {
            '"' => return (value, &quoted[at + 1..]),
            '\\' => value.extend(letters.next().map(|(_, letter)| letter)),
            letter => value.push(letter),
        }
    }
    (value, "")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(headers: &[&str]) -> Option<Challenge> {
        Challenge::choose(headers.iter().copied())
    }

    fn bearer(realm: &str, service: Option<&str>, scope: Option<&str>) -> Option<Challenge> {
        let owned = |text: Option<&str>| text.map(str::to_owned);
        Some(Challenge::Bearer { realm: realm.to_owned(), service: owned(service), scope: owned(scope) })
    }

    #[test]
    fn the_forms_of_real_registries_are_understood() {
        let hub = r#"Bearer realm="https://auth.docker.io/token",service="registry.docker.io",scope="repository:library/x:pull,push""#;
        let scope = Some("repository:library/x:pull,push");
        assert_eq!(chosen(&[hub]), bearer("https://auth.docker.io/token", Some("registry.docker.io"), scope));
        assert_eq!(chosen(&["Basic realm=\"Registry Realm\""]), Some(Challenge::Basic));
        assert_eq!(
            chosen(&["BASIC realm=x, bearer realm = \"a\\\"b\", error=\"x\""]),
            bearer("a\"b", None, None)
        );
        assert_eq!(chosen(&["Basic", "Bearer realm=r"]), bearer("r", None, None));
    }

    #[test]
    fn what_is_not_understood_is_left_out() {
        assert_eq!(chosen(&["Negotiate YII==", "Bearer service=\"x\"", "", "=,=", "realm=\"x\""]), None);
        assert_eq!(chosen(&["Bearer realm=\"no end"]), bearer("no end", None, None));
    }
}
