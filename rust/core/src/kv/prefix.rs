//! Which blocks hold which content: full blocks, found by all tokens from the start of the sequence.
//!
//! Contents form a tree. A node is one block's tokens behind one parent node, so equal nodes mean equal
//! prefixes: nothing rests on a hash being free of collisions, a hash only finds the few candidates whose
//! tokens are then compared. A node lives while a block holds its content or a longer content needs it as
//! a parent, so a prefix that was evicted and computed again leads to its old continuations.

use crate::fixed_map::FixedMap;

/// A content: a node of the tree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Content(u32);

impl Content {
    /// The empty prefix.
    pub(crate) const ROOT: Self = Self(0);
}

#[derive(Clone, Debug)]
struct Node {
    parent: Content,
    hash: u64,
    tokens: Box<[u64]>,
    /// Blocks that hold this content, the one registered first in front.
    blocks: Vec<u32>,
    children: u32,
    /// Next node of equal hash.
    alike: Option<Content>,
}

/// Finds blocks by content.
#[derive(Clone, Debug)]
pub(crate) struct PrefixIndex {
    nodes: Vec<Option<Node>>,
    vacant: Vec<Content>,
    by_hash: FixedMap<Content>,
    /// Content of each cached block, by block id.
    of_block: FixedMap<Content>,
    hash: fn(Content, &[u64]) -> u64,
}

impl Default for PrefixIndex {
    fn default() -> Self {
        Self::with_hash(hash)
    }
}

/// A fixed, unseeded hash: equal runs must do equal work.
fn hash(parent: Content, tokens: &[u64]) -> u64 {
    const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
    let mixed = tokens
        .iter()
        .fold(u64::from(parent.0).wrapping_mul(ODD), |hash, &token| (hash.rotate_left(23) ^ token).wrapping_mul(ODD));
    mixed ^ (mixed >> 32)
}

impl PrefixIndex {
    fn with_hash(hash: fn(Content, &[u64]) -> u64) -> Self {
        Self {
            nodes: vec![None],
            vacant: Vec::new(),
            by_hash: FixedMap::default(),
            of_block: FixedMap::default(),
            hash,
        }
    }

    /// The content that `tokens` make behind `parent`, if it is known.
    pub(crate) fn find(&self, parent: Content, tokens: &[u64]) -> Option<Content> {
        self.find_hashed((self.hash)(parent, tokens), parent, tokens)
    }

    /// The block that serves `content`.
    pub(crate) fn block(&self, content: Content) -> Option<u32> {
        self.node(content).blocks.first().copied()
    }

    /// Records that `block` holds `tokens` behind `parent`, and returns that content.
    pub(crate) fn register(&mut self, parent: Content, tokens: &[u64], block: u32) -> Content {
        let hash = (self.hash)(parent, tokens);
        let content = self.find_hashed(hash, parent, tokens).unwrap_or_else(|| self.insert(hash, parent, tokens));
        self.node_mut(content).blocks.push(block);
        let before = self.of_block.insert(block.into(), content);
        assert!(before.is_none(), "a block holds one content");
        content
    }

    /// Forgets what `block` holds.
    pub(crate) fn evict(&mut self, block: u32) {
        let content = self.of_block.remove(&block.into()).expect("a cached block has a content");
        self.node_mut(content).blocks.retain(|&other| other != block);
        self.prune(content);
    }

    fn find_hashed(&self, hash: u64, parent: Content, tokens: &[u64]) -> Option<Content> {
        let mut candidate = self.by_hash.get(&hash).copied();
        while let Some(content) = candidate {
            let node = self.node(content);
            if node.parent == parent && *node.tokens == *tokens {
                return Some(content);
            }
            candidate = node.alike;
        }
        None
    }

    fn insert(&mut self, hash: u64, parent: Content, tokens: &[u64]) -> Content {
        let content = self.vacant.pop().unwrap_or_else(|| {
            self.nodes.push(None);
            Content(u32::try_from(self.nodes.len() - 1).expect("no more contents than blocks and their parents"))
        });
        let alike = self.by_hash.insert(hash, content);
        let node = Node { parent, hash, tokens: tokens.into(), blocks: Vec::new(), children: 0, alike };
        self.nodes[content.0 as usize] = Some(node);
        if parent != Content::ROOT {
            self.node_mut(parent).children += 1;
        }
        content
    }

    /// Drops `content` and then its ancestors as far as nobody needs them.
    fn prune(&mut self, mut content: Content) {
        while content != Content::ROOT {
            let node = self.node(content);
            if !node.blocks.is_empty() || node.children > 0 {
                return;
            }
            let (parent, hash, alike) = (node.parent, node.hash, node.alike);
            self.unchain(content, hash, alike);
            self.nodes[content.0 as usize] = None;
            self.vacant.push(content);
            if parent != Content::ROOT {
                self.node_mut(parent).children -= 1;
            }
            content = parent;
        }
    }

    fn unchain(&mut self, content: Content, hash: u64, alike: Option<Content>) {
        if self.by_hash[&hash] == content {
            match alike {
                Some(next) => self.by_hash.insert(hash, next),
                None => self.by_hash.remove(&hash),
            };
            return;
        }
        let mut at = self.by_hash[&hash];
        loop {
            let node = self.node_mut(at);
            match node.alike {
                Some(next) if next == content => {
                    node.alike = alike;
                    return;
                }
                next => at = next.expect("every node hangs in the chain of its hash"),
            }
        }
    }

    fn node(&self, content: Content) -> &Node {
        self.nodes[content.0 as usize].as_ref().expect("a content in use has a node")
    }

    fn node_mut(&mut self, content: Content) -> &mut Node {
        self.nodes[content.0 as usize].as_mut().expect("a content in use has a node")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn serves(index: &PrefixIndex, prefix: &[&[u64]]) -> Option<u32> {
        let found = prefix.iter().try_fold(Content::ROOT, |parent, tokens| index.find(parent, tokens));
        found.and_then(|content| index.block(content))
    }

    #[test]
    fn the_whole_prefix_counts_even_if_every_hash_is_equal() {
        for hash in [hash as fn(Content, &[u64]) -> u64, |_, _| 7] {
            let mut index = PrefixIndex::with_hash(hash);
            let a = index.register(Content::ROOT, &[1, 2], 1);
            index.register(a, &[3, 4], 2);
            let b = index.register(Content::ROOT, &[9, 2], 3);
            assert_eq!(serves(&index, &[&[1, 2], &[3, 4]]), Some(2));
            assert_eq!(serves(&index, &[&[9, 2], &[3, 4]]), None);
            index.register(b, &[3, 4], 4);
            assert_eq!(serves(&index, &[&[9, 2], &[3, 4]]), Some(4));
            index.evict(2);
            assert_eq!(serves(&index, &[&[1, 2], &[3, 4]]), None);
            assert_eq!(serves(&index, &[&[9, 2], &[3, 4]]), Some(4));
            for block in [4, 1, 3] {
                index.evict(block);
            }
            assert!(index.of_block.is_empty() && index.by_hash.is_empty() && index.nodes.iter().all(Option::is_none));
        }
    }

    #[test]
    fn the_first_of_equal_blocks_serves_until_it_is_evicted() {
        let mut index = PrefixIndex::default();
        index.register(Content::ROOT, &[1], 5);
        index.register(Content::ROOT, &[1], 3);
        assert_eq!(serves(&index, &[&[1]]), Some(5));
        index.evict(5);
        assert_eq!(serves(&index, &[&[1]]), Some(3));
    }

    #[test]
    fn a_parent_computed_again_leads_to_its_old_continuations() {
        let mut index = PrefixIndex::default();
        let a = index.register(Content::ROOT, &[1], 1);
        index.register(a, &[2], 2);
        index.evict(1);
        assert_eq!(serves(&index, &[&[1]]), None);
        index.register(Content::ROOT, &[1], 7);
        assert_eq!(serves(&index, &[&[1], &[2]]), Some(2));
    }
}
