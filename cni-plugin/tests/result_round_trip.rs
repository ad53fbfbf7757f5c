//! Whatever a result holds, each version's shape gives back what that shape
//! can say.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use cni_plugin::{CniResult, Dns, Interface, IpConfig, Route, Version};
use ipnetwork::IpNetwork;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

fn any_ip() -> impl Strategy<Value = IpAddr> {
    prop_oneof![
        any::<u32>().prop_map(|bits| IpAddr::V4(Ipv4Addr::from(bits))),
        any::<u128>().prop_map(|bits| IpAddr::V6(Ipv6Addr::from(bits))),
    ]
}

fn any_network() -> impl Strategy<Value = IpNetwork> {
    (any_ip(), 0..=128u8).prop_map(|(ip, len)| {
        let len = if ip.is_ipv4() { len % 33 } else { len };
        IpNetwork::new(ip, len).expect("the length fits the family")
    })
}

prop_compose! {
    fn any_interface()(name in "[a-z]{1,8}", mac in "([0-9a-f]{2}:){5}[0-9a-f]{2}|", mtu in option::of(1u32..),
                       sandbox in "(/[a-z]{1,5}){0,3}", socket_path in "(/[a-z]{1,5}){0,2}", pci_id in "[0-9.]{0,4}")
        -> Interface { Interface { name, mac, mtu, sandbox, socket_path, pci_id } }
}

prop_compose! {
    fn any_address()(interface in option::of(0..5i64), address in any_network(), gateway in option::of(any_ip()))
        -> IpConfig { IpConfig { interface, address, gateway } }
}

prop_compose! {
    fn any_route()(dst in any_network(), gw in option::of(any_ip()), mtu: u32, adv_mss: u32, priority: u32,
                   table in option::of(any::<u32>()), scope in option::of(any::<u8>()))
        -> Route { Route { dst, gw, mtu, adv_mss, priority, table, scope } }
}

prop_compose! {
    fn any_dns()(nameservers in vec("[0-9.]{1,9}", 0..3), domain in "[a-z.]{0,9}",
                 search in vec("[a-z.]{1,9}", 0..3), options in vec("[a-z:0-9]{1,9}", 0..3))
        -> Dns { Dns { nameservers, domain, search, options } }
}

prop_compose! {
    fn any_result()(interfaces in vec(any_interface(), 0..4), ips in vec(any_address(), 0..4),
                    routes in vec(any_route(), 0..4), dns in any_dns())
        -> CniResult { CniResult { interfaces, ips, routes, dns } }
}

proptest! {
    #[test]
    fn version_1_says_everything(result in any_result()) {
        for version in [Version::V1_0_0, Version::V1_1_0] {
            let json = result.to_json(version).unwrap();
            prop_assert_eq!(&CniResult::from_json(&json, Version::V0_1_0).unwrap(), &result);
        }
    }

    #[test]
    fn versions_0_3_and_0_4_say_all_but_the_newer_interface_fields(result in any_result()) {
        let mut expected = result.clone();
        for interface in &mut expected.interfaces {
            *interface = Interface {
                name: interface.name.clone(),
                mac: interface.mac.clone(),
                sandbox: interface.sandbox.clone(),
                ..Interface::default()
            };
        }
        for version in [Version::V0_3_0, Version::V0_3_1, Version::V0_4_0] {
            let json = result.to_json(version).unwrap();
            prop_assert_eq!(&CniResult::from_json(&json, Version::LATEST).unwrap(), &expected);
        }
    }

    #[test]
    fn versions_0_1_and_0_2_keep_the_first_address_of_each_family(result in any_result()) {
        for version in [Version::V0_1_0, Version::V0_2_0] {
            let Ok(json) = result.to_json(version) else {
                prop_assert!(result.ips.is_empty());
                continue;
            };
            let back = CniResult::from_json(&json, Version::LATEST).unwrap();
            for is_v4 in [true, false] {
                let first = |r: &CniResult| r.ips.iter().find(|ip| ip.address.is_ipv4() == is_v4)
                    .map(|ip| (ip.address, ip.gateway));
                prop_assert_eq!(first(&back), first(&result));
            }
            prop_assert!(back.interfaces.is_empty());
            prop_assert_eq!(&back.dns, &result.dns);
        }
    }

    #[test]
    fn no_text_makes_the_reader_panic(text in "\\PC{0,200}") {
        if let Ok(value) = serde_json::from_str(&text) {
            drop(CniResult::from_json(&value, Version::LATEST));
        }
    }
}
