"""Waits and tests of a program's pending requests, in any order and by any method."""

from mpi4py import MPI as plain


class Entry:
    """A request of a program.

    Args:
        request: the request.
        done: is called when a call has reported it, with the status.
        receives: whether it surely ends without what this rank does later.
        alone: whether it may fail, so that no other may be waited for with it.
        cancels: cancels it, if it may be cancelled.
    """

    def __init__(self, request, done, receives=False, alone=False, cancels=None):
        self.request, self.done = request, done
        self.receives, self.alone, self.cancels = receives, alone, cancels
        self.active = True


class Pending:
    """The requests of a rank, which are waited for by methods that are drawn.

    Args:
        side: the library.
        draw: the generator of this rank's choices.
    """

    def __init__(self, side, draw):
        self.side, self.draw, self.entries = side, draw, []
        self._requests = side.MPI.Request

    def add(self, *args, **options):
        self.entries.append(Entry(*args, **options))
        return self.entries[-1]

    def active(self, alone=False):
        return [each for each in self.entries if each.active and each.alone == alone]

    def step(self):
        """Wait or test once, for what ends without later steps of this rank."""
        if alone := self.active(alone=True):
            self._single(self.draw.choice(alone))
        if not (certain := [each for each in self.active() if each.receives]):
            return
        among = self._list(self.active())
        several = self._waitany, self._waitsome, self._testany, self._testsome
        single = self._get_status, self._single
        method = self.draw.choice([*several, self._testall, self._cancel, *single])
        if method in single:
            method(self.draw.choice(certain))
        else:
            method(among)

    def finish(self):
        """Wait for all."""
        for each in self.active(alone=True):
            self._single(each)
        for _ in range(self.draw.randrange(3)):
            if self.active():
                self.draw.choice([self._waitany, self._waitsome])(
                    self._list(self.active())
                )
        while self.active():
            among = self._list(self.active())
            self.draw.choice([self._waitall, self._until_testall])(among)
        self._nothing(self._list([]))
        self.entries.clear()

    def _list(self, entries):
        """Return requests in some order, with those that are done, and null ones."""
        done = [each for each in self.entries if not each.active and not each.alone]
        null = Entry(self.side.MPI.REQUEST_NULL, None)
        null.active = False
        among = entries + self.draw.sample(done, len(done) // 2) + [null]
        self.draw.shuffle(among)
        return among

    def _report(self, entry, status):
        assert entry.active, "a call reported a request that was done before"
        entry.active = False
        entry.done(status)

    def _nothing(self, among):
        """Check what calls say of requests of which none is active."""
        requests, status = [each.request for each in among], plain.Status()
        of = self._requests
        self.side.note(
            *("none", of.Waitany(requests, status), status.source, status.tag),
            *(of.Testany(requests), of.Waitsome(requests), of.Testsome(requests)),
            *(of.Testall(requests), of.Waitall(requests)),
        )

    # One request.

    def _single(self, entry):
        status = plain.Status()
        if self.draw.random() < 0.5 or not self.side.on_device:
            error = self.side.refused(lambda: entry.request.Wait(status))
        else:
            found = []
            error = self.side.refused(lambda: found.append(until(entry, status)))
        if error is None:
            self._report(entry, status)
        else:
            self.side.note("failed", error)
            entry.active = False
            entry.done(None)

    def _get_status(self, entry):
        if self.side.choose(lambda: entry.request.Get_status()):
            while not entry.request.Get_status():
                pass

    def _cancel(self, among):
        may = [each for each in among if each.active and each.cancels is not None]
        if may:
            entry = self.draw.choice(may)
            entry.cancels()
            entry.cancels = None

    # Several.

    def _indexed(self, among, ask):
        """Report what a call says is done: indices and statuses."""
        found = []

        def first():
            indices, statuses = ask([each.request for each in among])
            found.extend(statuses)
            return indices

        indices = self.side.choose(first)
        for place, index in enumerate(indices):
            if not self.side.on_device:
                assert among[index].active
                found.append(plain.Status())
                among[index].request.Wait(found[place])
            self._report(among[index], found[place])

    def _any(self, requests, call):
        status = plain.Status()
        index, done = call(requests, status)
        assert done or index == plain.UNDEFINED
        return ([index], [status]) if done else ([], [])

    def _some(self, requests, call):
        statuses = [plain.Status() for _ in requests]
        return call(requests, statuses), statuses

    def _waitany(self, among):
        def call(requests, status):
            return self._requests.Waitany(requests, status), True

        self._indexed(among, lambda requests: self._any(requests, call))

    def _testany(self, among):
        self._indexed(among, lambda r: self._any(r, self._requests.Testany))

    def _waitsome(self, among):
        self._indexed(among, lambda r: self._some(r, self._requests.Waitsome))

    def _testsome(self, among):
        self._indexed(among, lambda r: self._some(r, self._requests.Testsome))

    def _testall(self, among):
        requests = [each.request for each in among]
        statuses = [plain.Status() for _ in among]
        ask = self._requests.Testall
        if not self.side.choose(lambda: ask(requests, statuses)):
            return
        if not self.side.on_device:
            self._requests.Waitall(requests, statuses)
        self._all(among, statuses)

    def _until_testall(self, among):
        requests = [each.request for each in among]
        statuses = [plain.Status() for _ in among]
        while not self._requests.Testall(requests, statuses):
            pass
        self._all(among, statuses)

    def _waitall(self, among):
        statuses = [plain.Status() for _ in among]
        self._requests.Waitall([each.request for each in among], statuses)
        self._all(among, statuses)

    def _all(self, among, statuses):
        for entry, status in zip(among, statuses, strict=True):
            if entry.active:
                self._report(entry, status)
            else:
                self.side.note("inactive", status.source, status.tag)


def until(entry, status):
    """Test a request until it is done."""
    while not entry.request.Test(status):
        pass
