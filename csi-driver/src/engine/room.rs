//! What the pool has, and what of it may be claimed.

use std::sync::Arc;

use crate::backend::pool::Pool;
use crate::error::Result;
use crate::model::capacity::{InodeRoom, Overcommit, Room};

#[derive(Debug, Clone)]
pub(crate) struct PoolRoom {
    pub(crate) pool: Arc<Pool>,
    pub(crate) overcommit: Overcommit,
}

impl PoolRoom {
    pub(crate) fn now(&self) -> Result<Room> {
        let (pool_bytes, overcommit) = (self.pool.capacity_bytes()?, self.overcommit);
        let inodes = self.pool.inodes()?.map(|inodes| InodeRoom {
            promised: overcommit.of(inodes.claimable_by(pool_bytes)),
            bytes_each: inodes.bytes_each(),
        });
        Ok(Room { pool_bytes, promised_bytes: overcommit.of(pool_bytes), inodes })
    }
}
