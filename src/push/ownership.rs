//! Which node pushes for a subscription.

use crate::connector::SubscriptionEntry;

/// Decides it for this node.
#[derive(Debug, Clone, Copy, Default)]
pub struct Ownership;

impl Ownership {
    /// Whether this node pushes for a subscription now. Asked before a worker starts and each time its subscription changes;
    /// all subscriptions are looked at again from time to time. Every node does at present: leases keep their messages apart.
    pub async fn is_ours(self, _entry: &SubscriptionEntry) -> bool {
        true
    }
}
