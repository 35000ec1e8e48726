//! The prefix index: finds a full block by all tokens from the start of its sequence.
//!
//! Contents form a tree. A node is the tokens of one block after a parent node, so equal nodes mean equal prefixes. A
//! hash only finds candidates, and their tokens are then compared, so a hash collision is harmless. A node exists while
//! a block has its content or a child refers to it. So a prefix that was evicted and is computed again leads to its old
//! children.

use crate::fixed_map::FixedMap;

/// The content of a full block and of all blocks before it: a node of the tree.
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
    /// Blocks with this content, in order of registration.
    blocks: Vec<u32>,
    children: u32,
    /// Next node with the same hash.
    same_hash: Option<Content>,
}

/// Finds blocks by content.
#[derive(Clone, Debug)]
pub(crate) struct PrefixIndex {
    nodes: Vec<Option<Node>>,
    free_nodes: Vec<Content>,
    /// First node with a hash.
    by_hash: FixedMap<Content>,
    /// Content of each cached block.
    by_block: FixedMap<Content>,
    hash: fn(Content, &[u64]) -> u64,
}

impl Default for PrefixIndex {
    fn default() -> Self {
        Self::with_hash(hash)
    }
}

/// Hash without a random seed: equal runs must execute equal instructions.
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
            free_nodes: Vec::new(),
            by_hash: FixedMap::default(),
            by_block: FixedMap::default(),
            hash,
        }
    }

    /// Return the content of `tokens` after `parent`, if it is indexed.
    pub(crate) fn find(&self, parent: Content, tokens: &[u64]) -> Option<Content> {
        self.find_hashed((self.hash)(parent, tokens), parent, tokens)
    }

    /// Return the first block with `content`.
    pub(crate) fn block(&self, content: Content) -> Option<u32> {
        self.node(content).blocks.first().copied()
    }

    /// Record that `block` has `tokens` after `parent`, and return that content.
    pub(crate) fn register(&mut self, parent: Content, tokens: &[u64], block: u32) -> Content {
        let hash = (self.hash)(parent, tokens);
        let content = self.find_hashed(hash, parent, tokens).unwrap_or_else(|| self.insert(hash, parent, tokens));
        self.node_mut(content).blocks.push(block);
        let before = self.by_block.insert(block.into(), content);
        assert!(before.is_none(), "a block has one content");
        content
    }

    /// Remove `block` from the index.
    pub(crate) fn evict(&mut self, block: u32) {
        let content = self.by_block.remove(&block.into()).expect("a cached block has a content");
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
            candidate = node.same_hash;
        }
        None
    }

    fn insert(&mut self, hash: u64, parent: Content, tokens: &[u64]) -> Content {
        let content = self.free_nodes.pop().unwrap_or_else(|| {
            self.nodes.push(None);
            Content(u32::try_from(self.nodes.len() - 1).expect("fewer than 2^32 nodes"))
        });
        let same_hash = self.by_hash.insert(hash, content);
        let node = Node { parent, hash, tokens: tokens.into(), blocks: Vec::new(), children: 0, same_hash };
        self.nodes[content.0 as usize] = Some(node);
        if parent != Content::ROOT {
            self.node_mut(parent).children += 1;
        }
        content
    }

    /// Remove `content` and every ancestor left without references.
    fn prune(&mut self, mut content: Content) {
        while content != Content::ROOT {
            let node = self.node(content);
            if !node.blocks.is_empty() || node.children > 0 {
                return;
            }
            let (parent, hash, same_hash) = (node.parent, node.hash, node.same_hash);
            self.unlink(content, hash, same_hash);
            self.nodes[content.0 as usize] = None;
            self.free_nodes.push(content);
            if parent != Content::ROOT {
                self.node_mut(parent).children -= 1;
            }
            content = parent;
        }
    }

    /// Remove `content` from the list of nodes with `hash`; `next` is the node after it.
    fn unlink(&mut self, content: Content, hash: u64, next: Option<Content>) {
        if self.by_hash[&hash] == content {
            match next {
                Some(next) => self.by_hash.insert(hash, next),
                None => self.by_hash.remove(&hash),
            };
            return;
        }
        let mut at = self.by_hash[&hash];
        loop {
            let node = self.node_mut(at);
            match node.same_hash {
                Some(found) if found == content => {
                    node.same_hash = next;
                    return;
                }
                following => at = following.expect("every node is in the list of its hash"),
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

    fn find_block(index: &PrefixIndex, prefix: &[&[u64]]) -> Option<u32> {
        let found = prefix.iter().try_fold(Content::ROOT, |parent, tokens| index.find(parent, tokens));
        found.and_then(|content| index.block(content))
    }

    #[test]
    fn the_whole_prefix_is_compared_even_if_all_hashes_are_equal() {
        for hash in [hash as fn(Content, &[u64]) -> u64, |_, _| 7] {
            let mut index = PrefixIndex::with_hash(hash);
            let a = index.register(Content::ROOT, &[1, 2], 1);
            index.register(a, &[3, 4], 2);
            let b = index.register(Content::ROOT, &[9, 2], 3);
            assert_eq!(find_block(&index, &[&[1, 2], &[3, 4]]), Some(2));
            assert_eq!(find_block(&index, &[&[9, 2], &[3, 4]]), None);
            index.register(b, &[3, 4], 4);
            assert_eq!(find_block(&index, &[&[9, 2], &[3, 4]]), Some(4));
            index.evict(2);
            assert_eq!(find_block(&index, &[&[1, 2], &[3, 4]]), None);
            assert_eq!(find_block(&index, &[&[9, 2], &[3, 4]]), Some(4));
            for block in [4, 1, 3] {
                index.evict(block);
            }
            assert!(index.by_block.is_empty() && index.by_hash.is_empty() && index.nodes.iter().all(Option::is_none));
        }
    }

    #[test]
    fn the_first_of_equal_blocks_is_found_until_it_is_evicted() {
        let mut index = PrefixIndex::default();
        index.register(Content::ROOT, &[1], 5);
        index.register(Content::ROOT, &[1], 3);
        assert_eq!(find_block(&index, &[&[1]]), Some(5));
        index.evict(5);
        assert_eq!(find_block(&index, &[&[1]]), Some(3));
    }

    #[test]
    fn a_recomputed_parent_leads_to_its_old_children() {
        let mut index = PrefixIndex::default();
        let a = index.register(Content::ROOT, &[1], 1);
        index.register(a, &[2], 2);
        index.evict(1);
        assert_eq!(find_block(&index, &[&[1]]), None);
        index.register(Content::ROOT, &[1], 7);
        assert_eq!(find_block(&index, &[&[1], &[2]]), Some(2));
    }
}
