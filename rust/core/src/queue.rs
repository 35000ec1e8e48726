//! The waiting queue, first come first served or by priority. No other module decides the order of requests.

use std::collections::{BTreeMap, VecDeque};

use crate::request::Row;

/// First-come-first-served queue.
///
/// Push and pop take constant time. Removing a request from the middle leaves a gap, and all gaps are closed once they
/// are more than half of the entries, so that a burst of cancellations costs no more than the length of the queue.
#[derive(Clone, Debug, Default)]
pub struct Fifo {
    /// Ticket and request in order of arrival; `None` marks a gap. The first entry is never a gap.
    entries: VecDeque<(u64, Option<Row>)>,
    gaps: usize,
    next: u64,
}

impl Fifo {
    /// Append `row` and return its ticket, by which [`Fifo::remove`] finds it.
    pub fn push(&mut self, row: Row) -> u64 {
        let ticket = self.next;
        self.next += 1;
        self.entries.push_back((ticket, Some(row)));
        ticket
    }

    /// Return the oldest request.
    pub fn head(&self) -> Option<Row> {
        self.entries.front().and_then(|&(_, row)| row)
    }

    /// Remove and return the oldest request.
    pub fn pop(&mut self) -> Option<Row> {
        let (_, row) = self.entries.pop_front()?;
        self.trim();
        row
    }

    /// Remove the request with `ticket`. Returns `false` if the request is no longer queued.
    pub fn remove(&mut self, ticket: u64) -> bool {
        let Ok(i) = self.entries.binary_search_by_key(&ticket, |&(t, _)| t) else { return false };
        if self.entries[i].1.take().is_none() {
            return false;
        }
        self.gaps += 1;
        self.trim();
        if self.gaps > self.entries.len() / 2 {
            self.close_gaps();
        }
        true
    }

    /// Number of waiting requests.
    pub fn len(&self) -> usize {
        self.entries.len() - self.gaps
    }

    /// Whether no request is waiting.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Return the request at `position`, where 0 is the oldest. Closes the gaps first.
    pub fn get(&mut self, position: usize) -> Option<Row> {
        if self.gaps > 0 {
            self.close_gaps();
        }
        self.entries.get(position).and_then(|&(_, row)| row)
    }

    /// Return all waiting requests, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = Row> + '_ {
        self.entries.iter().filter_map(|&(_, row)| row)
    }

    /// Bytes of heap memory held, unused capacity included.
    pub fn heap_bytes(&self) -> usize {
        self.entries.capacity() * size_of::<(u64, Option<Row>)>()
    }

    /// Drop the gaps at the front.
    fn trim(&mut self) {
        while let Some((_, None)) = self.entries.front() {
            self.entries.pop_front();
            self.gaps -= 1;
        }
    }

    fn close_gaps(&mut self) {
        self.entries.retain(|(_, row)| row.is_some());
        self.gaps = 0;
    }
}

/// Order of the waiting requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Policy {
    /// First come, first served.
    #[default]
    Fcfs,
    /// Lower priority numbers first, ties in order of arrival.
    Priority,
}

/// Arrival number of a request in a [`Queue`], by which [`Queue::remove`] finds it.
pub type Ticket = u64;

/// The waiting queue under either policy.
#[derive(Clone, Debug)]
pub enum Queue {
    /// First come, first served.
    Fcfs(Fifo),
    /// By priority, ties in order of arrival.
    Priority {
        /// Waiting requests by priority and ticket.
        entries: BTreeMap<(i64, Ticket), Row>,
        /// Ticket of the next arrival.
        next: Ticket,
    },
}

impl Queue {
    /// Return an empty queue with that order.
    pub fn new(policy: Policy) -> Self {
        match policy {
            Policy::Fcfs => Self::Fcfs(Fifo::default()),
            Policy::Priority => Self::Priority { entries: BTreeMap::new(), next: 0 },
        }
    }

    /// Add a request and return its ticket. `priority` is ignored under [`Policy::Fcfs`].
    pub fn push(&mut self, row: Row, priority: i64) -> Ticket {
        match self {
            Self::Fcfs(fifo) => fifo.push(row),
            Self::Priority { entries, next } => {
                let ticket = *next;
                *next += 1;
                entries.insert((priority, ticket), row);
                ticket
            }
        }
    }

    /// Return the head, the next request in queue order.
    pub fn head(&self) -> Option<Row> {
        match self {
            Self::Fcfs(fifo) => fifo.head(),
            Self::Priority { entries, .. } => entries.first_key_value().map(|(_, &row)| row),
        }
    }

    /// Remove and return the head.
    pub fn pop(&mut self) -> Option<Row> {
        match self {
            Self::Fcfs(fifo) => fifo.pop(),
            Self::Priority { entries, .. } => entries.pop_first().map(|(_, row)| row),
        }
    }

    /// Remove the request with that priority and ticket. Returns `false` if the request is no longer queued.
    pub fn remove(&mut self, priority: i64, ticket: Ticket) -> bool {
        match self {
            Self::Fcfs(fifo) => fifo.remove(ticket),
            Self::Priority { entries, .. } => entries.remove(&(priority, ticket)).is_some(),
        }
    }

    /// Number of waiting requests.
    pub fn len(&self) -> usize {
        match self {
            Self::Fcfs(fifo) => fifo.len(),
            Self::Priority { entries, .. } => entries.len(),
        }
    }

    /// Whether no request is waiting.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of heap memory held, unused capacity included. Under [`Policy::Priority`] it is an upper bound, since the
    /// nodes of the tree are at least half full.
    pub fn heap_bytes(&self) -> usize {
        match self {
            Self::Fcfs(fifo) => fifo.heap_bytes(),
            Self::Priority { entries, .. } => 2 * entries.len() * size_of::<((i64, Ticket), Row)>(),
        }
    }

    /// Return the first `count` waiting requests, in queue order.
    pub fn first(&self, count: usize) -> impl Iterator<Item = Row> + '_ {
        let (fifo, entries) = match self {
            Self::Fcfs(fifo) => (Some(fifo.iter()), None),
            Self::Priority { entries, .. } => (None, Some(entries.values().copied())),
        };
        fifo.into_iter().flatten().chain(entries.into_iter().flatten()).take(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Slab;

    fn rows(n: usize) -> Vec<Row> {
        let mut slab = Slab::default();
        (0..n).map(|_| slab.insert(())).collect()
    }

    #[test]
    fn fifo_keeps_its_order_when_requests_are_removed() {
        let rows = rows(6);
        let mut queue = Fifo::default();
        let tickets: Vec<u64> = rows.iter().map(|&row| queue.push(row)).collect();
        assert!(queue.remove(tickets[2]) && queue.remove(tickets[0]) && !queue.remove(tickets[2]));
        assert_eq!(queue.len(), 4);
        assert_eq!(queue.head(), Some(rows[1]));
        assert_eq!(queue.get(1), Some(rows[3]));
        assert!(queue.remove(tickets[4]));
        assert_eq!(queue.iter().collect::<Vec<_>>(), [rows[1], rows[3], rows[5]]);
        assert_eq!(
            [queue.pop(), queue.pop(), queue.pop(), queue.pop()],
            [Some(rows[1]), Some(rows[3]), Some(rows[5]), None]
        );
        assert!(queue.is_empty() && !queue.remove(tickets[5]));
    }

    #[test]
    fn lower_priority_numbers_come_first_then_earlier_arrivals() {
        let rows = rows(4);
        let mut queue = Queue::new(Policy::Priority);
        let tickets: Vec<Ticket> = [5, 3, 0, 3].iter().zip(&rows).map(|(&p, &row)| queue.push(row, p)).collect();
        assert_eq!(queue.first(9).collect::<Vec<_>>(), [rows[2], rows[1], rows[3], rows[0]]);
        assert!(queue.remove(3, tickets[1]) && !queue.remove(3, tickets[1]));
        assert_eq!([queue.pop(), queue.pop(), queue.pop()], [Some(rows[2]), Some(rows[3]), Some(rows[0])]);
    }
}
