//! The result of ADD in the forms of all versions of the specification.
//!
//! Invariant: there is one type, that of 1.1.0; the version matters only when JSON is read or
//! written. Fields that an older form lacks are omitted (0.2.0 has one address for each family and
//! no interfaces).

use std::net::IpAddr;

use ipnetwork::IpNetwork;
use serde_json::{Map, Value};

use crate::conf::Fields;
use crate::{CniError, Version};

/// The result of ADD.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CniResult {
    pub interfaces: Vec<Interface>,
    pub ips: Vec<IpConfig>,
    pub routes: Vec<Route>,
    pub dns: Dns,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Interface {
    pub name: String,
    /// `aa:bb:cc:dd:ee:ff`, or empty.
    pub mac: String,
    /// Bytes; only in 1.x.
    pub mtu: Option<u32>,
    /// Path of the namespace; empty for interfaces of the host.
    pub sandbox: String,
    /// Only in 1.x, empty otherwise.
    pub socket_path: String,
    /// Only in 1.x, empty otherwise.
    pub pci_id: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IpConfig {
    /// Index into [`CniResult::interfaces`]; not in the results of IPAM plugins.
    pub interface: Option<i64>,
    /// The address with its network's prefix length.
    pub address: IpNetwork,
    pub gateway: Option<IpAddr>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    pub dst: IpNetwork,
    pub gw: Option<IpAddr>,
    /// Bytes; 0: unset.
    pub mtu: u32,
    /// Bytes; 0: unset.
    pub adv_mss: u32,
    /// Metric; 0: unset.
    pub priority: u32,
    pub table: Option<u32>,
    /// `rtnetlink(7)`'s scope: 0 global, 253 link.
    pub scope: Option<u8>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dns {
    pub nameservers: Vec<String>,
    pub domain: String,
    pub search: Vec<String>,
    pub options: Vec<String>,
}

/// The three forms that results have had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    /// 0.1.0, 0.2.0: one address per family.
    PerFamily,
    /// 0.3.0 to 0.4.0: lists; addresses carry their IP version.
    Lists,
    /// 1.x: lists, keys in alphabetical order in the reference's output.
    Alphabetical,
}

impl Shape {
    fn of(version: Version) -> Self {
        match version {
            Version::V0_1_0 | Version::V0_2_0 => Self::PerFamily,
            Version::V0_3_0 | Version::V0_3_1 | Version::V0_4_0 => Self::Lists,
            Version::V1_0_0 | Version::V1_1_0 => Self::Alphabetical,
        }
    }

    /// The `cniVersion` texts of this form, in the reference's order.
    fn versions(self) -> Vec<&'static str> {
        let unversioned = (self == Self::PerFamily).then_some("");
        let of_shape = Version::ALL.into_iter().filter(|version| Self::of(*version) == self);
        unversioned.into_iter().chain(of_shape.map(Version::as_str)).collect()
    }
}

impl CniResult {
    /// The JSON for `version`, with keys in the reference's order. Fails if an old form needs an
    /// address and there is none.
    pub fn to_json(&self, version: Version) -> Result<Value, CniError> {
        match Shape::of(version) {
            Shape::PerFamily => self.per_family(version),
            Shape::Lists => Ok(self.lists(version)),
            Shape::Alphabetical => Ok(sorted(self.lists_1x(version))),
        }
    }

    /// Returns the error of [`CniResult::to_json`], if any.
    pub fn ensure_fits(&self, version: Version) -> Result<(), CniError> {
        match Shape::of(version) {
            Shape::PerFamily => self.per_family(version).map(drop),
            Shape::Lists | Shape::Alphabetical => Ok(()),
        }
    }

    /// Reads a result in the form of its `cniVersion`, or of the configuration's version `asked` if
    /// it has none.
    pub fn from_json(value: &Value, asked: Version) -> Result<Self, CniError> {
        Self::from_fields(&Fields::of(value, "result")?, asked)
    }

    /// [`Self::from_json`] for a `prevResult`, which must have the form of `asked`.
    pub(crate) fn from_prev_result(fields: &Fields<'_>, asked: Version) -> Result<Self, CniError> {
        let shape = Shape::of(asked);
        let known = shape.versions();
        match fields.string("cniVersion")? {
            Some(version) if !known.contains(&version.as_str()) => Err(CniError::internal(format_args!(
                "result type supports [{}] but unmarshalled CNIVersion is {version:?}",
                known.join(" ")
            ))),
            _ => Self::from_shape(fields, shape),
        }
    }

    fn from_fields(fields: &Fields<'_>, asked: Version) -> Result<Self, CniError> {
        let version = match fields.string("cniVersion")?.filter(|text| !text.is_empty()) {
            None => asked,
            Some(text) => Version::parse(&text)
                .ok_or_else(|| CniError::internal(format_args!("unsupported CNI result version {text:?}")))?,
        };
        Self::from_shape(fields, Shape::of(version))
    }

    fn from_shape(fields: &Fields<'_>, shape: Shape) -> Result<Self, CniError> {
        match shape {
            Shape::PerFamily => from_per_family(fields),
            Shape::Lists | Shape::Alphabetical => from_lists(fields),
        }
    }

    fn per_family(&self, version: Version) -> Result<Value, CniError> {
        let mut object = Map::new();
        object.insert("cniVersion".into(), version.as_str().into());
        for (key, is_v4) in [("ip4", true), ("ip6", false)] {
            let Some(ip) = self.ips.iter().find(|ip| ip.address.is_ipv4() == is_v4) else { continue };
            let mut family = Map::new();
            family.insert("ip".into(), ip.address.to_string().into());
            insert_some(&mut family, "gateway", ip.gateway.map(|gateway| gateway.to_string()));
            let routes = self.routes.iter().filter(|route| route.dst.is_ipv4() == is_v4);
            let routes = routes.map(|route| {
                let mut pair = Map::new();
                pair.insert("dst".into(), route.dst.to_string().into());
                insert_some(&mut pair, "gw", route.gw.map(|gw| gw.to_string()));
                Value::Object(pair)
            });
            insert_list(&mut family, "routes", routes.collect());
            object.insert(key.into(), Value::Object(family));
        }
        if object.len() == 1 {
            return Err(CniError::internal("cannot convert: no valid IP addresses"));
        }
        object.insert("dns".into(), Value::Object(self.dns.to_json()));
        Ok(Value::Object(object))
    }

    fn lists(&self, version: Version) -> Value {
        let interfaces = self.interfaces.iter().map(|interface| {
            let mut object = Map::new();
            object.insert("name".into(), interface.name.clone().into());
            insert_text(&mut object, "mac", &interface.mac);
            insert_text(&mut object, "sandbox", &interface.sandbox);
            Value::Object(object)
        });
        let ips = self.ips.iter().map(|ip| {
            let mut object = Map::new();
            object.insert("version".into(), if ip.address.is_ipv4() { "4" } else { "6" }.into());
            ip.fill(&mut object);
            Value::Object(object)
        });
        let mut object = Map::new();
        object.insert("cniVersion".into(), version.as_str().into());
        insert_list(&mut object, "interfaces", interfaces.collect());
        insert_list(&mut object, "ips", ips.collect());
        insert_list(&mut object, "routes", self.routes.iter().map(Route::to_json).collect());
        object.insert("dns".into(), Value::Object(self.dns.to_json()));
        Value::Object(object)
    }

    fn lists_1x(&self, version: Version) -> Value {
        let interfaces = self.interfaces.iter().map(|interface| {
            let mut object = Map::new();
            object.insert("name".into(), interface.name.clone().into());
            insert_text(&mut object, "mac", &interface.mac);
            insert_number(&mut object, "mtu", interface.mtu.unwrap_or(0));
            insert_text(&mut object, "sandbox", &interface.sandbox);
            insert_text(&mut object, "socketPath", &interface.socket_path);
            insert_text(&mut object, "pciID", &interface.pci_id);
            Value::Object(object)
        });
        let ips = self.ips.iter().map(|ip| {
            let mut object = Map::new();
            ip.fill(&mut object);
            Value::Object(object)
        });
        let mut object = Map::new();
        object.insert("cniVersion".into(), version.as_str().into());
        insert_list(&mut object, "interfaces", interfaces.collect());
        insert_list(&mut object, "ips", ips.collect());
        insert_list(&mut object, "routes", self.routes.iter().map(Route::to_json).collect());
        if !self.dns.is_empty() {
            object.insert("dns".into(), Value::Object(self.dns.to_json()));
        }
        Value::Object(object)
    }
}

impl IpConfig {
    fn fill(&self, object: &mut Map<String, Value>) {
        insert_some(object, "interface", self.interface);
        object.insert("address".into(), self.address.to_string().into());
        insert_some(object, "gateway", self.gateway.map(|gateway| gateway.to_string()));
    }

    fn read(fields: &Fields<'_>) -> Result<Self, CniError> {
        Ok(Self {
            interface: fields.i64("interface")?,
            address: required(fields, "address")?,
            gateway: fields.ip("gateway")?,
        })
    }
}

impl Route {
    /// A route with only its destination and gateway.
    pub fn new(dst: IpNetwork, gw: Option<IpAddr>) -> Self {
        Self { dst, gw, mtu: 0, adv_mss: 0, priority: 0, table: None, scope: None }
    }

    /// Reads one element of a `routes` list, of a result or a configuration.
    pub fn read(fields: &Fields<'_>) -> Result<Self, CniError> {
        let scope = fields.u32("scope")?;
        Ok(Self {
            dst: required(fields, "dst")?,
            gw: fields.ip("gw")?,
            mtu: fields.u32("mtu")?.unwrap_or(0),
            adv_mss: fields.u32("advmss")?.unwrap_or(0),
            priority: fields.u32("priority")?.unwrap_or(0),
            table: fields.u32("table")?,
            scope: scope.map(u8::try_from).transpose().map_err(|_| {
                let path = fields.path_of("scope");
                CniError::internal(format_args!(
                    "{path}: expected a number from 0 to 255, found {}",
                    scope.unwrap_or(0)
                ))
            })?,
        })
    }

    fn to_json(&self) -> Value {
        let mut object = Map::new();
        object.insert("dst".into(), self.dst.to_string().into());
        insert_some(&mut object, "gw", self.gw.map(|gw| gw.to_string()));
        insert_number(&mut object, "mtu", self.mtu);
        insert_number(&mut object, "advmss", self.adv_mss);
        insert_number(&mut object, "priority", self.priority);
        insert_some(&mut object, "table", self.table);
        insert_some(&mut object, "scope", self.scope);
        Value::Object(object)
    }
}

impl Dns {
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Reads a `dns` object, of a result or a configuration.
    pub fn read(fields: &Fields<'_>) -> Result<Self, CniError> {
        Ok(Self {
            nameservers: fields.strings("nameservers")?,
            domain: fields.string("domain")?.unwrap_or_default(),
            search: fields.strings("search")?,
            options: fields.strings("options")?,
        })
    }

    fn to_json(&self) -> Map<String, Value> {
        let texts = |list: &[String]| list.iter().cloned().map(Value::from).collect();
        let mut object = Map::new();
        insert_list(&mut object, "nameservers", texts(&self.nameservers));
        insert_text(&mut object, "domain", &self.domain);
        insert_list(&mut object, "search", texts(&self.search));
        insert_list(&mut object, "options", texts(&self.options));
        object
    }
}

fn from_lists(fields: &Fields<'_>) -> Result<CniResult, CniError> {
    let interface = |fields: &Fields<'_>| -> Result<Interface, CniError> {
        Ok(Interface {
            name: fields.string("name")?.unwrap_or_default(),
            mac: fields.string("mac")?.unwrap_or_default(),
            mtu: fields.u32("mtu")?.filter(|mtu| *mtu > 0),
            sandbox: fields.string("sandbox")?.unwrap_or_default(),
            socket_path: fields.string("socketPath")?.unwrap_or_default(),
            pci_id: fields.string("pciID")?.unwrap_or_default(),
        })
    };
    Ok(CniResult {
        interfaces: fields.objects("interfaces")?.iter().map(interface).collect::<Result<_, _>>()?,
        ips: fields.objects("ips")?.iter().map(IpConfig::read).collect::<Result<_, _>>()?,
        routes: fields.objects("routes")?.iter().map(Route::read).collect::<Result<_, _>>()?,
        dns: read_dns(fields)?,
    })
}

fn from_per_family(fields: &Fields<'_>) -> Result<CniResult, CniError> {
    let mut result = CniResult { dns: read_dns(fields)?, ..CniResult::default() };
    for key in ["ip4", "ip6"] {
        let Some(family) = fields.object(key)? else { continue };
        let (address, gateway) = (required(&family, "ip")?, family.ip("gateway")?);
        result.ips.push(IpConfig { interface: None, address, gateway });
        for route in family.objects("routes")? {
            result.routes.push(Route::read(&route)?);
        }
    }
    Ok(result)
}

fn read_dns(fields: &Fields<'_>) -> Result<Dns, CniError> {
    fields.object("dns")?.map_or_else(|| Ok(Dns::default()), |dns| Dns::read(&dns))
}

fn required(fields: &Fields<'_>, key: &str) -> Result<IpNetwork, CniError> {
    fields.cidr(key)?.ok_or_else(|| CniError::internal(format_args!("{}: missing", fields.path_of(key))))
}

/// Go's `omitempty`, for each type of value.
fn insert_text(object: &mut Map<String, Value>, key: &str, text: &str) {
    if !text.is_empty() {
        object.insert(key.into(), text.into());
    }
}

fn insert_number(object: &mut Map<String, Value>, key: &str, number: u32) {
    if number != 0 {
        object.insert(key.into(), number.into());
    }
}

fn insert_list(object: &mut Map<String, Value>, key: &str, list: Vec<Value>) {
    if !list.is_empty() {
        object.insert(key.into(), Value::Array(list));
    }
}

fn insert_some(object: &mut Map<String, Value>, key: &str, value: Option<impl Into<Value>>) {
    if let Some(value) = value {
        object.insert(key.into(), value.into());
    }
}

fn sorted(value: Value) -> Value {
    match value {
        Value::Object(object) => {
            let mut pairs: Vec<(String, Value)> =
                object.into_iter().map(|(key, value)| (key, sorted(value))).collect();
            pairs.sort_by(|(a, _), (b, _)| a.cmp(b));
            Value::Object(pairs.into_iter().collect())
        }
        Value::Array(items) => Value::Array(items.into_iter().map(sorted).collect()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> CniResult {
        let interface = |name: &str, sandbox: &str| Interface {
            name: name.into(),
            mac: "02:00:00:00:00:01".into(),
            sandbox: sandbox.into(),
            ..Interface::default()
        };
        CniResult {
            interfaces: vec![interface("cni0", ""), interface("eth0", "/run/netns/x")],
            ips: vec![
                IpConfig {
                    interface: Some(1),
                    address: "10.1.0.2/24".parse().unwrap(),
                    gateway: Some("10.1.0.1".parse().unwrap()),
                },
                IpConfig { interface: Some(1), address: "fd00::2/64".parse().unwrap(), gateway: None },
            ],
            routes: vec![
                Route {
                    mtu: 1400,
                    table: Some(7),
                    scope: Some(253),
                    ..Route::new("0.0.0.0/0".parse().unwrap(), Some("10.1.0.1".parse().unwrap()))
                },
                Route::new("::/0".parse().unwrap(), None),
            ],
            dns: Dns::default(),
        }
    }

    fn text(version: Version) -> String {
        example().to_json(version).unwrap().to_string()
    }

    #[test]
    fn each_shape_has_the_references_keys_in_the_references_order() {
        assert_eq!(
            text(Version::V0_2_0),
            r#"{"cniVersion":"0.2.0","ip4":{"ip":"10.1.0.2/24","gateway":"10.1.0.1","routes":[{"dst":"0.0.0.0/0","gw":"10.1.0.1"}]},"ip6":{"ip":"fd00::2/64","routes":[{"dst":"::/0"}]},"dns":{}}"#
        );
        assert_eq!(
            text(Version::V0_4_0),
            r#"{"cniVersion":"0.4.0","interfaces":[{"name":"cni0","mac":"02:00:00:00:00:01"},{"name":"eth0","mac":"02:00:00:00:00:01","sandbox":"/run/netns/x"}],"ips":[{"version":"4","interface":1,"address":"10.1.0.2/24","gateway":"10.1.0.1"},{"version":"6","interface":1,"address":"fd00::2/64"}],"routes":[{"dst":"0.0.0.0/0","gw":"10.1.0.1","mtu":1400,"table":7,"scope":253},{"dst":"::/0"}],"dns":{}}"#
        );
        assert_eq!(
            text(Version::V1_0_0),
            r#"{"cniVersion":"1.0.0","interfaces":[{"mac":"02:00:00:00:00:01","name":"cni0"},{"mac":"02:00:00:00:00:01","name":"eth0","sandbox":"/run/netns/x"}],"ips":[{"address":"10.1.0.2/24","gateway":"10.1.0.1","interface":1},{"address":"fd00::2/64","interface":1}],"routes":[{"dst":"0.0.0.0/0","gw":"10.1.0.1","mtu":1400,"scope":253,"table":7},{"dst":"::/0"}]}"#
        );
    }

    #[test]
    fn the_oldest_shape_needs_an_address() {
        let err = CniResult::default().to_json(Version::V0_1_0).unwrap_err();
        assert_eq!((err.code, err.msg.as_str()), (999, "cannot convert: no valid IP addresses"));
        assert_eq!(
            CniResult::default().to_json(Version::V1_1_0).unwrap().to_string(),
            r#"{"cniVersion":"1.1.0"}"#
        );
    }

    #[test]
    fn a_result_without_version_has_that_of_the_configuration() {
        let old = serde_json::json!({"ip4": {"ip": "10.1.0.2/24", "gateway": "10.1.0.1", "routes": [{"dst": "0.0.0.0/0"}]}});
        let result = CniResult::from_json(&old, Version::V0_2_0).unwrap();
        assert_eq!(result.ips[0].address.to_string(), "10.1.0.2/24");
        assert_eq!(result.routes[0], Route::new("0.0.0.0/0".parse().unwrap(), None));
        let err = CniResult::from_json(&serde_json::json!({"cniVersion": "7"}), Version::V0_2_0).unwrap_err();
        assert_eq!(err.msg, r#"unsupported CNI result version "7""#);
    }
}
