//! The daemon against the real kernel: each test mounts a volume in a mount
//! namespace of its own, with a driver that is played by the fixture.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod accounting;
mod asynchronous;
mod attributes;
mod capacity;
mod confinement;
mod cuts;
mod directories;
mod files;
mod fixture;
mod hand_over;
mod holes;
mod keepers;
mod known;
mod mapped;
mod mapping;
mod metrics;
mod model;
mod ownership;
mod passthrough;
mod pauses;
mod remounts;
mod semantics;
mod takeover;
mod trust;
mod writeback;
