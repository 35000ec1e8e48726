"""The block pool of the exclusive oracle."""


class Pool:
    """KV blocks 1, 2, …: free queue (allocation takes from its front), reference counts, cached content."""

    def __init__(self, num_blocks):
        self.free = list(range(1, num_blocks + 1))
        self.references = dict.fromkeys(self.free, 0)
        self.content = {}  # block -> all tokens up to its end, in order of registration

    def allocate(self):
        block = self.free.pop(0)
        self.content.pop(block, None)
        self.references[block] = 1
        return block

    def share(self, content):
        """Add a reference to the block that was registered first for `content`, and return it; `None` on a miss."""
        for block, cached in self.content.items():
            if cached == content:
                if self.references[block] == 0:
                    self.free.remove(block)
                self.references[block] += 1
                return block
        return None

    def release(self, blocks):
        """Remove a reference from each block.

        Of the blocks left without references, those without cached content go to the front of the free queue, the
        others to its end; both in reverse order of position.
        """
        for block in blocks:
            self.references[block] -= 1
        freed = [block for block in reversed(blocks) if self.references[block] == 0]
        uncached = [block for block in freed if block not in self.content]
        self.free = uncached + self.free + [block for block in freed if block in self.content]
