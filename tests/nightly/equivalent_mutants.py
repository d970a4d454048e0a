"""Mutants that no test can tell from the code, each with the reason.

Keyed by what mutants.Mutant.change gives: file, the lines that the change takes away, those that it
brings, each stripped.
"""

EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "service/channel/client.py",
        "self._silence = Silence(settings.look_interval_s, 0.0)",
        "self._silence = Silence(settings.look_interval_s, None)",
    ): "every connection tells it the time anew before anybody looks",
    (
        "service/channel/client.py",
        "self._last_sent_s = 0.0",
        "self._last_sent_s = None",
    ): "every connection sets it before anybody reads it",
    (
        "service/channel/client.py",
        "self.address.unix_path, limit=READ_BUFFER_BYTES\n)",
        "self.address.unix_path, )",
    ): "frames of any length are read whole; less is read ahead of them",
    (
        "service/routing/routed_stream.py",
        'self._received = array("i", request.resumed_token_ids)',
        'self._received = array("I", request.resumed_token_ids)',
    ): "token ids are never negative, and travel as a list",
    (
        "service/tokenizer/encoder.py",
        "messages, tools=tools, add_generation_prompt=False, kwargs=kwargs",
        "messages, tools=tools, add_generation_prompt=True, kwargs=kwargs",
    ): "what the template writes behind the last message is cut off",
    (
        "service/tokenizer/pieces.py",
        '_hide(pieces, special_ids, ""),',
        '_hide(pieces, special_ids, "XXXX"),',
    ): "whoever decodes pieces of text leaves hidden tokens out before",
    (
        "service/tokenizer/pieces.py",
        "return [tokenizer.id_to_token(token_id) for token_id in range(max(ids, default=-1) + 1)]",
        "return [tokenizer.id_to_token(token_id) for token_id in range(max(ids, default=-2) + 1)]",
    ): "a range up to -1 is as empty as one up to 0",
    (
        "service/tokenizer/token_floor.py",
        'bases = text if text.isascii() else unicodedata.normalize("NFD", text)',
        'bases = text if (text.isascii()) and False else unicodedata.normalize("NFD", text)',
    ): "ASCII decomposes into itself, at more cost",
    (
        "service/tokenizer/token_floor.py",
        'return set((token + written).encode("utf-8", "surrogatepass"))',
        'return set((token + written).encode("UTF-8", "surrogatepass"))',
    ): "another spelling of the same encoding",
    (
        "workers/kv_cache/eviction_order.py",
        "self._taken = [-1, -1, -1]",
        "self._taken = [+1, -1, -1]",
    ): "the horizon says nothing of barren leaves, the first of the three",
    (
        "workers/kv_cache/page_allocator.py",
        "ranks = np.arange(len(pages), dtype=np.int32)",
        "ranks = np.arange(len(pages), )",
    ): "the same ranks in another type, stored as int32 all the same",
    (
        "workers/kv_cache/page_pool.py",
        "if num_missing > 0:",
        "if num_missing >= 0:",
    ): "to evict no page and free none changes nothing",
    (
        "workers/kv_cache/prefix_cache.py",
        'self._root = RadixNode.root("")',
        "self._root = RadixNode.root(None)",
    ): "nobody asks for the salt of a tree that keeps nothing",
    (
        "workers/kv_cache/radix_cache.py",
        "while len(token_ids) - position >= page_size:",
        "while len(token_ids) + position >= page_size:",
    ): "what is left of the last page is shorter than any key of a child",
    (
        "workers/kv_cache/radix_node.py",
        "node = cls(EMPTY, EMPTY, None)",
        "node = cls(None, EMPTY, None)",
    ): "nobody asks for the tokens of a root",
    (
        "workers/kv_cache/radix_node.py",
        "node = cls(EMPTY, EMPTY, None)",
        "node = cls(EMPTY, None, None)",
    ): "nobody asks for the pages of a root",
    (
        "workers/scheduler/prefills_under_way.py",
        "is_running = request.slot != NO_SLOT and not request.is_ended",
        "is_running = request.slot != NO_SLOT or not request.is_ended",
    ): "who was retracted has nothing to compute either; who has ended holds no slot",
}
