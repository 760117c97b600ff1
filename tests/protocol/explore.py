"""Look for a wrong state of a `Model`: among the largest states where they tell of all, else in every state."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from .model import Model, Window, bits, closure, required


@dataclass
class Verdict:
    """The result of a search.

    - `wrong`: a description of the wrong state that was found, "" if there is none.
    - `states`: the number of states that were looked at.
    - `path`: the names of the commits that lead to the wrong state.
    """

    wrong: str
    states: int
    path: list[str] = field(default_factory=list)


def explore(model: Model, most_states: int = 5_000_000, *, one_by_one: bool = False) -> Verdict:
    """Say whether a state of `model` is wrong; raise RuntimeError if that takes more than `most_states`.

    one_by_one: explore every state, also where the largest ones tell of all.
    """
    search = _Search(model, most_states)
    return search.largest_states() if search.only_grows and not one_by_one else search.every_state()


# A state: the commits so far, and the last writer of each word that has unordered writers.
_State = tuple[int, tuple[int, ...]]


class _Search:
    def __init__(self, model: Model, most_states: int) -> None:
        self._model, self._most = model, most_states
        self._before = closure(model.commits)
        self._required = required(model)
        self._reduce()
        self._index_words()
        self._index_windows()
        # What is possible stays possible: no word goes back, and no kernel takes the multiprocessors from another.
        self.only_grows = not self._contested and all(
            not commit.others and (commit.kind != "wait" or number in self._lasting)
            for number, commit in enumerate(model.commits)
        )

    def _direct(self, mask: int) -> int:
        # Drop the commits that others of the set imply.
        implied = 0
        for number in bits(mask):
            implied |= self._before[number]
        return mask & ~implied

    def _reduce(self) -> None:
        self._need = [self._direct(commit.need) for commit in self._model.commits]
        self._dependents: list[list[int]] = [[] for _ in self._need]
        for number, mask in enumerate(self._need):
            for each in bits(mask):
                self._dependents[each].append(number)
        # A start also depends on the commits that end earlier programs.
        for number, commit in enumerate(self._model.commits):
            for each in bits(_union(commit.earlier)):
                self._dependents[each].append(number)

    def _index_words(self) -> None:
        commits = self._model.commits
        self._writers: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for number, commit in enumerate(commits):
            if commit.kind == "signal":
                assert commit.word is not None
                self._writers[commit.word].append(number)
        contested = []
        for word, numbers in self._writers.items():
            numbers.sort(key=lambda number: (_call(commits[number].name), number))
            pairs = [(a, b) for i, a in enumerate(numbers) for b in numbers[i + 1 :]]
            if any(commits[a].epoch != commits[b].epoch and not self._before[b] >> a & 1 for a, b in pairs):
                contested.append(word)
        self._contested = {word: place for place, word in enumerate(contested)}
        self._accepting: dict[int, int] = {}
        self._lasting: set[int] = set()
        for number, commit in enumerate(commits):
            if commit.kind != "wait":
                continue
            assert commit.word is not None
            writers = self._writers[commit.word]
            history = [
                self._model.accepted(epoch, commit.epoch)
                for epoch in (self._model.first_epoch, *(commits[each].epoch for each in writers))
            ]
            if commit.word not in self._contested and history == sorted(history):
                self._lasting.add(number)
                self._accepting[number] = (
                    -1 if history[0] else sum(1 << each for each, ok in zip(writers, history[1:], strict=True) if ok)
                )
                for each in bits(self._accepting[number] if not history[0] else 0):
                    self._dependents[each].append(number)
            else:
                for each in writers:
                    self._dependents[each].append(number)

    def _index_windows(self) -> None:
        windows = self._model.windows
        self._opening: list[list[int]] = [[] for _ in self._need]
        self._window_need = [self._direct(window.need) for window in windows]
        self._closers = [window.closers for window in windows]
        for number in self._required:
            for each in bits(self._window_need[number]):
                self._opening[each].append(number)
        settling = _union(tuple(self._closers[first] for firsts in self._required.values() for first in firsts))
        unlasting = {
            commit.word
            for number, commit in enumerate(self._model.commits)
            if commit.kind == "wait" and number not in self._lasting
        }
        self._eager = [self._is_eager(number, settling, unlasting) for number in range(len(self._need))]

    def _is_eager(self, number: int, settling: int, unlasting: set[tuple[int, int, int] | None]) -> bool:
        # A commit is eager if a delay reaches no new state: it closes no window that matters, and no wait can miss it.
        commit = self._model.commits[number]
        if commit.kind == "wait":
            return number in self._lasting
        if commit.others:
            # Kernels may get the multiprocessors in any order.
            return False
        word_lasts = commit.word not in unlasting and commit.word not in self._contested
        return word_lasts and not settling >> number & 1

    def _seen(self, word: tuple[int, int, int], state: _State) -> int:
        commits = self._model.commits
        if word in self._contested:
            last = state[1][self._contested[word]]
            return self._model.first_epoch if last < 0 else commits[last].epoch
        for number in reversed(self._writers[word]):
            if state[0] >> number & 1:
                return commits[number].epoch
        return self._model.first_epoch

    def _possible(self, number: int, state: _State) -> bool:
        need = self._need[number]
        if state[0] & need != need:
            return False
        commit = self._model.commits[number]
        if commit.kind == "wait":
            if number in self._lasting:
                accepting = self._accepting[number]
                return accepting < 0 or bool(state[0] & accepting)
            assert commit.word is not None
            return self._model.accepted(self._seen(commit.word, state), commit.epoch)
        if commit.kind == "start":
            if commit.others:
                return not any(state[0] & begin and not state[0] & end for begin, end in commit.others)
            running = sum(1 for each in commit.earlier if state[0] & each != each)
            return running < commit.residency
        return True

    def _take(self, number: int, state: _State) -> tuple[_State, list[int]]:
        # Return the state after this commit and all eager commits that follow, and the commits taken.
        mask, last = state
        taken, at = [number], 0
        mask |= 1 << number
        while at < len(taken):
            done = taken[at]
            at += 1
            word = self._model.commits[done].word
            if word in self._contested and self._model.commits[done].kind == "signal":
                place = self._contested[word]
                last = (*last[:place], done, *last[place + 1 :])
            for each in self._dependents[done]:
                if not mask >> each & 1 and self._eager[each] and self._possible(each, (mask, last)):
                    mask |= 1 << each
                    taken.append(each)
        return (mask, last), taken

    def _wrong(self, mask: int, taken: list[int]) -> str:
        for done in taken:
            for number in self._opening[done]:
                need = self._window_need[number]
                if mask & need == need:
                    for first in self._required[number]:
                        if not mask & self._closers[first]:
                            return self._describe(self._model.windows[first], self._model.windows[number], mask)
        return ""

    def _describe(self, first: Window, second: Window, mask: int) -> str:
        begun = mask & first.need == first.need
        if first.write and not second.write:
            what = "half a chunk is read" if begun else "an old chunk is read"
        elif second.write and not first.write:
            what = "overwritten while it is read" if begun else "overwritten before it is read"
        else:
            what = "two calls' stores are unordered"
        return f"{what}: {second.name}, but not surely after {first.name}"

    def largest_states(self) -> Verdict:
        """Look at the largest state without the closers of a window, for each window that must have closed.

        If what is possible stays possible, two states without these commits have a union that is a state too, so one
        state has all others in it: a later window opens in none of them if not in that one.
        """
        if self._model.faults:
            return self._verdict(self._model.faults[0], 0)
        pairs: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for second, firsts in self._required.items():
            for first in firsts:
                pairs[self._closers[first]].append((first, second))
        windows = self._model.windows
        for number, closers in enumerate(pairs):
            mask, path = self._largest(closers)
            for first, second in pairs[closers]:
                need = self._window_need[second]
                if mask & need == need:
                    return Verdict(self._describe(windows[first], windows[second], mask), number + 1, path)
        mask, path = self._largest(0)
        if mask != (1 << len(self._need)) - 1:
            return Verdict(f"deadlock: {self._stuck((mask, ()))}", len(pairs) + 1, path)
        return Verdict("", len(pairs) + 1)

    def _largest(self, without: int) -> tuple[int, list[str]]:
        # Return the state of everything that is possible without some commits, and what leads to it.
        mask, path = 0, []
        left = [number for number, need in enumerate(self._need) if not need]
        for number in left:
            if not (mask | without) >> number & 1 and self._possible(number, (mask, ())):
                mask |= 1 << number
                path.append(self._model.commits[number].name)
                # What was not possible before is asked again.
                left += self._dependents[number]
        return mask, path

    def every_state(self) -> Verdict:
        """Explore depth first, until a state is wrong."""
        if self._model.faults:
            return self._verdict(self._model.faults[0], 0)
        roots = [number for number, need in enumerate(self._need) if not need]
        start: _State = (0, (-1,) * len(self._contested))
        taken: list[int] = []
        for number in roots:
            if not start[0] >> number & 1 and self._eager[number] and self._possible(number, start):
                start, more = self._take(number, start)
                taken += more
        parents: dict[_State, tuple[_State, int] | None] = {start: None}
        opened = [number for number in self._required if not self._window_need[number]]
        for number in opened:
            for first in self._required[number]:
                return self._verdict(self._describe(self._model.windows[first], self._model.windows[number], 0), 1)
        wrong = self._wrong(start[0], taken)
        if wrong:
            return self._verdict(wrong, 1)
        final = (1 << len(self._need)) - 1
        # For each state, the commits that are not eager and whose needs are met.
        ready = frozenset(
            number
            for number, need in enumerate(self._need)
            if not self._eager[number] and start[0] & need == need and not start[0] >> number & 1
        )
        stack = [(start, ready)]
        while stack:
            state, choices = stack.pop()
            usable = [number for number in choices if self._possible(number, state)]
            if not usable and state[0] != final:
                return self._verdict(f"deadlock: {self._stuck(state)}", len(parents), parents, state)
            for number in usable:
                after, taken = self._take(number, state)
                if after in parents:
                    continue
                parents[after] = (state, number)
                wrong = self._wrong(after[0], taken)
                if wrong:
                    return self._verdict(wrong, len(parents), parents, after)
                if len(parents) > self._most:
                    raise RuntimeError(f"more than {self._most} states")
                fresh = {
                    each
                    for done in taken
                    for each in self._dependents[done]
                    if not self._eager[each]
                    and not after[0] >> each & 1
                    and self._need[each] & after[0] == self._need[each]
                }
                stack.append((after, (choices - {number}) | fresh))
        return self._verdict("", len(parents))

    def _stuck(self, state: _State) -> str:
        missing = [
            commit.name
            for number, commit in enumerate(self._model.commits)
            if commit.kind in ("wait", "start")
            and not state[0] >> number & 1
            and state[0] & self._need[number] == self._need[number]
        ]
        return "never: " + "; ".join(missing)

    def _verdict(
        self, wrong: str, states: int, parents: dict[_State, tuple[_State, int] | None] | None = None,
        state: _State | None = None,
    ) -> Verdict:  # fmt: skip
        path = []
        while parents is not None and state is not None and (parent := parents[state]) is not None:
            path.append(self._model.commits[parent[1]].name)
            state = parent[0]
        return Verdict(wrong, states, path[::-1])


def _union(masks: tuple[int, ...]) -> int:
    union = 0
    for mask in masks:
        union |= mask
    return union


def _call(name: str) -> int:
    return int(name.split(", call ")[1].split(",")[0])
