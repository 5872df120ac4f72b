"""Whether receives with wildcards can all be matched, whatever arrives first."""

from mpi4py.MPI import ANY_SOURCE, ANY_TAG


def fits(pattern, source, tag):
    """Return whether a receive takes a message."""
    return pattern[0] in (source, ANY_SOURCE) and pattern[1] in (tag, ANY_TAG)


def all_matched(messages, patterns):
    """Return whether every receive gets a message, in every order that MPI permits.

    Args:
        messages: by source, the tags of its messages, in their order.
        patterns: a source and a tag of each receive, in the order they are posted.
    """
    sources, seen = [*messages], set()

    def explore(arrived, posted, unexpected, waiting):
        state = arrived, posted, unexpected, waiting
        if state in seen:
            return True
        seen.add(state)
        end = posted == len(patterns)
        for place, source in enumerate(sources):
            tags = messages[source]
            if arrived[place] == len(tags):
                continue
            end = False
            tag = tags[arrived[place]]
            more = (*arrived[:place], arrived[place] + 1, *arrived[place + 1 :])
            for each in waiting:
                if fits(patterns[each], source, tag):
                    left = tuple(other for other in waiting if other != each)
                    reached = more, posted, unexpected, left
                    break
            else:
                reached = more, posted, (*unexpected, (source, tag)), waiting
            if not explore(*reached):
                return False
        if posted < len(patterns):
            for at, message in enumerate(unexpected):
                if fits(patterns[posted], *message):
                    left = unexpected[:at] + unexpected[at + 1 :]
                    reached = arrived, posted + 1, left, waiting
                    break
            else:
                reached = arrived, posted + 1, unexpected, (*waiting, posted)
            if not explore(*reached):
                return False
        return not (end and waiting)

    return explore((0,) * len(sources), 0, (), ())
