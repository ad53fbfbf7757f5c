//! What names look like, with Kubernetes' own explanations.

/// Checks a value that is not empty; the explanation says what it must be.
pub(super) type Rule = fn(&str) -> Result<(), String>;

/// RFC 1123 label: containers, volumes, namespaces, host names.
pub(super) fn label(value: &str) -> Result<(), String> {
    longest(value, 63)?;
    if is_label(value) {
        return Ok(());
    }
    Err("a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')".to_owned())
}

/// RFC 1123 subdomain: the names of objects.
pub(super) fn subdomain(value: &str) -> Result<(), String> {
    longest(value, 253)?;
    if value.split('.').all(is_label) {
        return Ok(());
    }
    Err("a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')".to_owned())
}

/// The keys of labels and annotations: an optional DNS prefix and a name.
pub(super) fn qualified(value: &str) -> Result<(), String> {
    let (prefix, name) = value.split_once('/').map_or((None, value), |(prefix, name)| (Some(prefix), name));
    if let Some(prefix) = prefix {
        subdomain(prefix).map_err(|broken| format!("prefix part {broken}"))?;
    }
    if is_word(name) && name.len() <= 63 {
        return Ok(());
    }
    Err("name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')".to_owned())
}

pub(super) fn label_value(value: &str) -> Result<(), String> {
    longest(value, 63)?;
    if value.is_empty() || is_word(value) {
        return Ok(());
    }
    Err("a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')".to_owned())
}

/// The keys of ConfigMaps and Secrets: each is the name of a file.
pub(super) fn configuration_key(value: &str) -> Result<(), String> {
    longest(value, 253)?;
    if !value.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte)) {
        return Err("a valid config key must consist of alphanumeric characters, '-', '_' or '.' (e.g. 'key.name',  or 'KEY_NAME',  or 'key-name', regex used for validation is '[-._a-zA-Z0-9]+')".to_owned());
    }
    match value {
        "." => Err("must not be '.'".to_owned()),
        ".." => Err("must not be '..'".to_owned()),
        _ if value.starts_with("..") => Err("must not start with '..'".to_owned()),
        _ => Ok(()),
    }
}

/// Since Kubernetes 1.34 anything printable but `=`.
pub(super) fn variable(value: &str) -> Result<(), String> {
    if value.bytes().all(|byte| (b' '..=b'~').contains(&byte) && byte != b'=') {
        return Ok(());
    }
    Err("a valid environment variable name must consist only of printable ASCII characters other than '='"
        .to_owned())
}

fn longest(value: &str, most: usize) -> Result<(), String> {
    if value.len() <= most { Ok(()) } else { Err(format!("must be no more than {most} characters")) }
}

fn is_label(text: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    text.bytes().all(|byte| inner(byte) || byte == b'-') && ends(text, inner)
}

fn is_word(text: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_alphanumeric();
    text.bytes().all(|byte| inner(byte) || b"-_.".contains(&byte)) && ends(text, inner)
}

fn ends(text: &str, inner: impl Fn(u8) -> bool) -> bool {
    match text.as_bytes() {
        [] => false,
        [first, .., last] => inner(*first) && inner(*last),
        [only] => inner(*only),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_keep_kubernetes_rules() {
        for good in ["a", "a-b", "0", &"a".repeat(63)] {
            label(good).unwrap();
        }
        for bad in ["A", "a_b", "-a", "a-", "a.b", "../x", "a/b"] {
            label(bad).unwrap_err();
        }
        assert_eq!(label(&"a".repeat(64)).unwrap_err(), "must be no more than 63 characters");
        subdomain("pvc-1.example").unwrap();
        subdomain("a..b").unwrap_err();
        qualified("hawser.dev/network").unwrap();
        qualified("Mine_1").unwrap();
        qualified("a/b/c").unwrap_err();
        label_value("").unwrap();
        label_value("-x").unwrap_err();
        variable("A.b-c 1").unwrap();
        variable("a=b").unwrap_err();
    }
}
