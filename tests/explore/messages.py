"""What a world of the explorer does with messages."""

from dataclasses import replace

from numba_symm import dtypes


class Messages:
    """The messages of a ``World``."""

    def messages(self, *counts):
        """Add messages of these lengths between random ranks, in one launch a rank."""
        self.groups(counts, lambda number: [range(number)])

    def groups(self, counts, divided):
        """Add messages between random ranks, which each rank divides into launches.

        ``divided(number)`` returns, for each launch, the indices of its messages.
        """
        Message = self.code.credit.Message
        mine = [[] for _ in self.ends]  # by rank: (whether it receives, message)
        for count in counts:
            src, dst = self.random.sample(range(self.size), 2)
            first = self.random.choice([0, 3])
            arrays, words = self.inputs(first + count)
            sent = Message(dst, arrays[src] + 8 * first, 8 * count)
            if self.random.random() < 0.5:
                sent = self.counting(src, sent, first, count)
            mine[src].append((False, sent))
            mine[dst].append((True, self.taking(src, dst, count)))
            self.expect(mine[dst][-1][1].address, words[src][first:])
        for end, messages in zip(self.ends, mine, strict=True):
            for places in divided(len(messages)):
                of_launch = [messages[place] for place in places]
                lists = [
                    [each for received, each in of_launch if received == receiving]
                    for receiving in (False, True)
                ]
                if any(lists):
                    launch = self.code.transfer.bind(end, *lists)
                    self.streams[end.rank].append(launch)

    def counting(self, rank, sent, first, count):
        """Return the same message with its count, and where it begins, in memory."""
        counts = self.map("counts", 16)[rank]
        for i, number in enumerate((first, count)):
            self.memory.plant(counts + 8 * i, 8, number)
        most = max(first, count + self.random.choice([0, 2]))
        displ_at = self.random.choice([0, counts])
        span = self.code.credit.Span(1, displ_at, first + count)
        return sent._replace(
            address=sent.address - 8 * first,
            nbytes=8 * most,
            count_at=counts + 8,
            itemsize=8,
            span=span,
        )

    def ahead(self):
        """Add a message that fills all slots of a channel before its receiver starts.

        Launches have one channel.
        """
        Message, programs = self.code.credit.Message, self.code.programs
        tiles = self.code.workspace.channels(self.size, False).tiles
        chunk = 2 * tiles * self.code.shape.threads
        count = self.code.workspace.DEPTH * chunk
        src, dst = self.random.sample(range(self.size), 2)
        arrays, words = self.inputs(count)
        taken = Message(src, self.map("output", 8 * count)[dst], 8 * count)
        self.expect(taken.address, words[src])
        sent = Message(dst, arrays[src], 8 * count)
        sends = self.code.transfer.bind(self.ends[src], [sent], [])
        receives = self.code.transfer.bind(self.ends[dst], [], [taken])
        self.streams[src].append(sends)
        self.launch(src, programs.put_one_signal, 1, self.contexts[src], dst)
        self.launch(dst, programs.wait_for_signal, 1, self.contexts[dst], src)
        self.streams[dst].append(receives)

    def above(self, count):
        """Add messages to all ranks, of which the first count does not fit.

        Nothing is sent, so no rank receives: it would wait for the record only.
        """
        fewer, more = self.random.randrange(count), count + self.size
        given = (count, fewer), (fewer, count), (fewer, more)
        capacity, limit = self.random.choice(given)
        src, *others = self.random.sample(range(self.size), self.size)
        arrays, _ = self.inputs(count)
        counts = self.map("counts", 8 * len(others))[src]
        Message, Span = self.code.credit.Message, self.code.credit.Span
        sends = []
        for k, dst in enumerate(others):  # the other counts follow the wrong one
            self.memory.plant(counts + 8 * k, 8, 1 if k else count)
            given = arrays[src], 8 * capacity, counts + 8 * k, 8, Span(k, 0, limit)
            sends.append(Message(dst, *given))
        self.streams[src].append(self.code.transfer.bind(self.ends[src], sends, []))
        region, flags = self.layout.transfer, 8 * self.code.workspace.DEPTH
        lanes = (self.size - 1) * self.code.workspace.channels_of(self.size)
        for dst in others:
            at = self.workspaces[dst] + region.flags
            self.expect(at, [0] * (flags * lanes // 8))

    def requests(self, *counts):
        """Add requests of these lengths, in an order in which none waits for another.

        In fact each direction of a pair has a stream of its own.
        """
        Message = self.code.credit.Message
        for count in counts:
            src, dst = self.random.sample(range(self.size), 2)
            arrays, words = self.inputs(count)
            taken = self.taking(src, dst, count)
            self.expect(taken.address, words[src])
            self._request(src, dst, Message(dst, arrays[src], 8 * count), taken)

    def _request(self, src, dst, sent, taken):
        nbytes = self.code.workspace.channels(self.size, True).end
        if not self.requested:
            self.requested = self.map("requests", nbytes, lambda offset: (0, 0))
        for rank, message in ((src, sent), (dst, taken)):
            own = tuple(self.requested)
            end = replace(self.ends[rank], workspaces=own, multiprocessors=1)
            given = end, self.workspaces[rank], message, message is taken
            self.streams[rank].append(self.code.transfer.bind_request(*given))

    def request_then_sum(self, count):
        """Add a request, and an all-reduce that follows it, of what it received."""
        Message = self.code.credit.Message
        src, dst = self.random.sample(range(self.size), 2)
        arrays, words = self.inputs(count)
        target = self.planted(count)[dst]
        self.expect(target, words[src])
        sent = Message(dst, arrays[src], 8 * count)
        self._request(src, dst, sent, Message(src, target, 8 * count))
        arrays[dst], words[dst] = target, words[src]
        self._sum(arrays, words)

    def sum_then_request(self, count):
        """Add an all-reduce, and a request that follows it, of its result."""
        Message = self.code.credit.Message
        src, dst = self.random.sample(range(self.size), 2)
        outputs, total = self._sum(*self.inputs(count))
        target = self.planted(count)[dst]
        self.expect(target, total)
        sent = Message(dst, outputs[src], 8 * count)
        self._request(src, dst, sent, Message(src, target, 8 * count))

    def _sum(self, arrays, words):
        """Add an all-reduce; return the ranks' outputs, and the words of the result."""
        count = len(words[0])
        outputs, element = self.planted(count), dtypes.element("int64", "test")
        total = [sum(column) for column in zip(*words, strict=True)]
        for end, source, target in zip(self.ends, arrays, outputs, strict=True):
            call = self.code.binding.Call(source, target, count, element, "sum")
            launch = self.bound("all_reduce", "chunked", end, call)
            self.streams[end.rank].append(launch)
            self.expect(target, total)
        return outputs, total

    def planted(self, count):
        """Return every rank's address of words that a kernel may load."""
        found = self.map("output", 8 * count)
        for address in found:
            for i in range(count):
                self.memory.plant(address + 8 * i, 8, i)
        return found

    def taking(self, src, dst, count):
        """Return a message that is received; sometimes it has room for more."""
        Message = self.code.credit.Message
        if self.random.random() < 0.5:
            target = self.map("output", 8 * count)[dst]
            return Message(src, target, 8 * count)
        room = count + self.random.choice([0, 1, 4, 4 * count])
        target, count_at = (self.map("output", 8 * n)[dst] for n in (room, 1))
        for i in range(count, room):
            self.memory.plant(target + 8 * i, 8, i)
            self.expect(target + 8 * i, [i])
        self.expect(count_at, [count])
        return Message(src, target, 8 * room, count_at, 8)

    def too_long(self, room):
        """Add a message that is longer than the room for it, which nothing changes."""
        count = room + self.random.choice([1, 2, 4 * room + 1])
        src, dst = self.random.sample(range(self.size), 2)
        arrays, _ = self.inputs(count)
        target, count_at = (self.map("output", 8 * n)[dst] for n in (count, 1))
        for i, address in enumerate([count_at, *range(target, target + 8 * count, 8)]):
            self.memory.plant(address, 8, i)
            self.expect(address, [i])
        Message = self.code.credit.Message
        sent = Message(dst, arrays[src], 8 * count)
        taken = Message(src, target, 8 * room, count_at, 8)
        for rank, lists in ((src, ([sent], [])), (dst, ([], [taken]))):
            launch = self.code.transfer.bind(self.ends[rank], *lists)
            self.streams[rank].append(launch)

    def differing(self, count, expected):
        """Add a message whose receiver expects another length; it stores nothing."""
        Message = self.code.credit.Message
        src, dst = self.random.sample(range(self.size), 2)
        arrays, _ = self.inputs(max(count, expected))
        target = self.map("output", 8 * expected)[dst]
        self.expect(target, [-1] * expected)
        sent = Message(dst, arrays[src], 8 * count)
        taken = Message(src, target, 8 * expected)
        for rank, lists in ((src, ([sent], [])), (dst, ([], [taken]))):
            launch = self.code.transfer.bind(self.ends[rank], *lists)
            self.streams[rank].append(launch)

    def with_gaps(self, count):
        """Add a message between arrays with gaps, packed and unpacked by kernels."""
        Message, pack = self.code.credit.Message, self.code.pack
        src, dst = self.random.sample(range(self.size), 2)
        rows = 1 + (count > 3)
        shape, strides = (rows, count), (8 * 2 * count + 8, 16)
        spread, words = self.inputs(rows * (2 * count + 1))
        target = self.map("output", 8 * rows * (2 * count + 1))[dst]
        packed = [self.map("packed", 8 * rows * count)[rank] for rank in (src, dst)]
        for row in range(rows):
            for i in range(2 * count):
                place = target + strides[0] * row + 8 * i
                self.memory.plant(place, 8, i)
                word = words[src][(2 * count + 1) * row + i] if i % 2 == 0 else i
                self.expect(place, [word])
        nbytes = 8 * rows * count
        steps = {
            src: [
                pack.bind(packed[0], spread[src], shape, strides, 8, True),
                self.code.transfer.bind(
                    self.ends[src], [Message(dst, packed[0], nbytes)], []
                ),
            ],
            dst: [
                pack.bind(packed[1], target, shape, strides, 8, True),
                self.code.transfer.bind(
                    self.ends[dst], [], [Message(src, packed[1], nbytes)]
                ),
                pack.bind(packed[1], target, shape, strides, 8, False),
            ],
        }
        for rank, launches in steps.items():
            self.streams[rank] += launches
