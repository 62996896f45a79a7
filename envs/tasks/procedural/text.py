"""Text search and edit; counting and sorting pipelines."""

from envs.tasks.procedural.checks import answer, texts
from envs.tasks.procedural.draw import Draw
from envs.tasks.procedural.family import Family, Spec, lines


def replace_word(draw: Draw) -> Spec:
    name, old, new, other = draw.words(4)
    if draw.difficulty == 1:
        body = [f"{other} {old}", old] if draw.below(2) else [old, other, old]
        wording = draw.choice(
            (
                "Replace {a} by {b} in {f}.",
                "In {f}, change {a} to {b}.",
                "Change {a} to {b} in {f}.",
            )
        )
        return Spec(
            wording.format(a=old, b=new, f=name),
            (f"sed -i s/{old}/{new}/ {name}",),
            (f"sed -i 1s/{old}/{new}/ {name}",),
            (texts({name: lines(*(line.replace(old, new) for line in body))}),),
            {name: lines(*body)},
        )
    if draw.difficulty == 2:
        body = draw.shuffled([f"{old} {other} {old}", other, f"{other} {old} {old}"])
        wording = draw.choice(
            ("Replace every {a} by {b} in {f}.", "In {f}, change all {a} to {b}, on every line.")
        )
        return Spec(
            wording.format(a=old, b=new, f=name),
            (f"sed -i s/{old}/{new}/g {name}",),
            (f"sed -i s/{old}/{new}/ {name}",),
            (texts({name: lines(*(line.replace(old, new) for line in body))}),),
            {name: lines(*body)},
        )
    mark, folder = draw.words(2)
    body = draw.shuffled([f"{mark} {old} {other}", f"{other} {old}", f"{mark} {old} {old}"])
    want = [line.replace(old, new) if line.startswith(mark) else line for line in body]
    paths = [f"{folder}/{word}" for word in draw.words(2)]
    return Spec(
        f"In all files of {folder}, replace {old} by {new}, only on lines with {mark}.",
        (f"sed -i /{mark}/s/{old}/{new}/g {folder}/*",),
        (f"sed -i s/{old}/{new}/g {folder}/*",),
        (texts({path: lines(*want) for path in paths}),),
        {path: lines(*body) for path in paths},
    )


def delete_lines(draw: Draw) -> Spec:
    name, bad, *rest = draw.words(5)
    if draw.difficulty == 1:
        body = draw.shuffled([rest[0], bad, rest[1]])
        wording = draw.choice(
            ("Delete the line {w} from {f}.", "Remove line {w} from {f}.", "Drop {w} from {f}.")
        )
        return Spec(
            wording.format(w=bad, f=name),
            (f"sed -i /{bad}/d {name}",),
            (f"sed -i s/{bad}// {name}",),
            (texts({name: lines(*(line for line in body if line != bad))}),),
            {name: lines(*body)},
        )
    if draw.difficulty == 2:
        body = draw.shuffled([rest[0], f"{bad} {rest[0]}", rest[1], f"{rest[2]} {bad}", rest[2]])
        wording = draw.choice(
            ("Delete all lines with {w} from {f}.", "Remove every line of {f} that has {w}.")
        )
        return Spec(
            wording.format(w=bad, f=name),
            (f"sed -i /{bad}/d {name}",),
            (f"sed -i /^{bad}/d {name}",),
            (texts({name: lines(*(line for line in body if bad not in line))}),),
            {name: lines(*body)},
        )
    body = draw.shuffled(
        [rest[0], f"#{bad}", "", f"{rest[1]} # {bad}", f"# {rest[0]}", f"{rest[2]}#{rest[0]}"]
    )
    kept = [line for line in body if line and not line.startswith("#")]
    return Spec(
        f"From {name}, delete empty lines and lines that start with #.",
        (f"sed -i '/^#/d; /^$/d' {name}",),
        (f"sed -i '/#/d; /^$/d' {name}",),
        (texts({name: lines(*kept)}),),
        {name: lines(*body)},
    )


def grep_lines(draw: Draw) -> Spec:
    name, out, key, *rest = draw.words(6)
    if draw.difficulty == 1:
        body = draw.shuffled([f"{key} {rest[0]}", rest[1], f"{rest[2]} {key}"])
        want = [line for line in body if key in line]
        wording = draw.choice(
            (
                "Save lines of {f} with {w} to {o}.",
                "Put the lines of {f} with {w} in {o}.",
                "Grep {w} in {f} into {o}.",
            )
        )
        return Spec(
            wording.format(w=key, f=name, o=out),
            (f"grep {key} {name} > {out}",),
            (f"grep -v {key} {name} > {out}",),
            (texts({out: lines(*want), name: lines(*body)}),),
            {name: lines(*body)},
            answer=" ".join(want),
        )
    if draw.difficulty == 2:
        body = draw.shuffled([f"{key} {rest[0]}", rest[1], f"{rest[2]} {key}", rest[0]])
        want = [line for line in body if key not in line]
        wording = draw.choice(
            ("Save the lines of {f} without {w} to {o}.", "Lines of {f} lacking {w} go to {o}.")
        )
        return Spec(
            wording.format(w=key, f=name, o=out),
            (f"grep -v {key} {name} > {out}",),
            (f"grep {key} {name} > {out}",),
            (texts({out: lines(*want), name: lines(*body)}),),
            {name: lines(*body)},
            answer=" ".join(want),
        )
    folder = draw.word()
    names = sorted(draw.words(3))
    hits, files = [], {}
    for item in names:
        body = draw.shuffled([f"{key} {draw.word()}", f"{draw.word()} {key}", draw.word()])
        files[f"{folder}/{item}"] = lines(*body)
        hits += [line for line in body if line.startswith(key)]
    return Spec(
        f"Collect all lines that start with {key} from the files of {folder}, sorted, in {out}.",
        (f"cat {folder}/* | grep ^{key} | sort > {out}",),
        (f"cat {folder}/* | grep {key} | sort > {out}",),
        (texts({out: lines(*sorted(hits))} | files),),
        files,
        answer=" ".join(sorted(hits)),
    )


def count_lines(draw: Draw) -> Spec:
    name, out, key, *rest = draw.words(5)
    if draw.difficulty == 1:
        count = draw.number(3, 9)
        body = [draw.choice((key, *rest)) for _ in range(count)]
        wording = draw.choice(
            (
                "Count the lines of {f} into {o}.",
                "Write the line count of {f} to {o}.",
                "How many lines has {f}? Answer in {o}.",
            )
        )
        return Spec(
            wording.format(f=name, o=out),
            (f"wc -l < {name} > {out}",),
            (f"wc -c < {name} > {out}",),
            (answer(out, count), texts({name: lines(*body)})),
            {name: lines(*body)},
            answer=str(count),
        )
    hits = draw.number(3, 9)
    if draw.difficulty == 2:
        body = draw.shuffled([f"{key} {draw.choice(rest)}"] * hits + rest * 2)
        wording = draw.choice(
            (
                "Count the lines of {f} with {w} into {o}.",
                "How many lines of {f} have {w}? Write to {o}.",
            )
        )
        return Spec(
            wording.format(f=name, w=key, o=out),
            (f"grep -c {key} {name} > {out}",),
            (f"wc -l < {name} > {out}",),
            (answer(out, hits), texts({name: lines(*body)})),
            {name: lines(*body)},
            answer=str(hits),
        )
    folder = draw.word()
    items = draw.shuffled([key] * hits + [rest[0]] * (hits + 1) + [rest[1]] * 3)
    paths = [f"{folder}/{word}" for word in draw.words(3)]
    # Two words on a line, so that counting matching lines is not counting words.
    pairs = [f"{key} {key}"] + [" ".join(items[i : i + 2]) for i in range(0, len(items), 2)]
    files = {path: lines(*pairs[i::3]) for i, path in enumerate(paths)}
    return Spec(
        f"How often does the word {key} occur in the files of {folder}? Write the number to {out}.",
        (f"cat {folder}/* | grep -o {key} | wc -l > {out}",),
        (f"cat {folder}/* | grep -c {key} > {out}",),
        (answer(out, hits + 2), texts(files)),
        files,
        answer=str(hits + 2),
    )


def sort_lines(draw: Draw) -> Spec:
    name, out, *rest = draw.words(6)
    if draw.difficulty == 1:
        body = sorted(rest[:3])
        body = body[1:] + body[:1]
        wording = draw.choice(
            (
                "Sort {f} into {o}.",
                "Write the sorted lines of {f} to {o}.",
                "Save {f} sorted as {o}.",
            )
        )
        return Spec(
            wording.format(f=name, o=out),
            (f"sort {name} > {out}",),
            (f"sort -r {name} > {out}",),
            (texts({out: lines(*sorted(body)), name: lines(*body)}),),
            {name: lines(*body)},
            answer=" ".join(sorted(body)),
        )
    if draw.difficulty == 2:
        ordered = sorted(rest)
        body = draw.shuffled([*ordered[1:], ordered[0], ordered[0], ordered[2]])
        wording = draw.choice(
            (
                "Sort {f} without duplicates into {o}.",
                "Write the unique lines of {f}, sorted, to {o}.",
            )
        )
        return Spec(
            wording.format(f=name, o=out),
            (f"sort -u {name} > {out}",),
            (f"sort {name} > {out}",),
            (texts({out: lines(*ordered), name: lines(*body)}),),
            {name: lines(*body)},
            answer=" ".join(ordered),
        )
    low, high = draw.numbers(2, 2, 9), draw.numbers(2, 11, 98)
    rows = [f"{n},{word}" for n, word in zip(draw.shuffled(low + high), rest, strict=True)]
    ordered = sorted(rows, key=lambda row: -int(row.split(",")[0]))
    return Spec(
        f"Sort {name} by its numbers, largest first, and save only the words to {out}.",
        (f"sort -t, -k1,1nr {name} | cut -d, -f2 > {out}",),
        (f"sort -t, -k1,1n {name} | cut -d, -f2 > {out}",),
        (texts({out: lines(*(r.split(",")[1] for r in ordered)), name: lines(*rows)}),),
        {name: lines(*rows)},
        answer=" ".join(row.split(",")[1] for row in ordered),
    )


def take_lines(draw: Draw) -> Spec:
    name, out, *rest = draw.words(7)
    if draw.difficulty == 1:
        first = draw.below(2) == 0
        count = draw.number(2, 4)
        body = rest
        wording = draw.choice(
            ("Save the {e} {n} lines of {f} to {o}.", "{e} {n} lines of {f} into {o}.")
        ).format(e="first" if first else "last", n=count, f=name, o=out)
        tool, wrong = ("head", "tail") if first else ("tail", "head")
        want = body[:count] if first else body[-count:]
        return Spec(
            wording[0].upper() + wording[1:],
            (f"{tool} -n {count} {name} > {out}",),
            (f"{wrong} -n {count} {name} > {out}",),
            (texts({out: lines(*want), name: lines(*body)}),),
            {name: lines(*body)},
            answer=" ".join(want),
        )
    body = [f"{draw.choice(rest)}{i}" for i in range(1, 15)]
    low = draw.number(2, 6)
    if draw.difficulty == 2:
        wording = draw.choice(
            ("Save line {n} of {f} to {o}.", "Write only line {n} of {f} to {o}.")
        )
        return Spec(
            wording.format(n=low, f=name, o=out),
            (f"sed -n {low}p {name} > {out}",),
            (f"head -n {low} {name} > {out}",),
            (texts({out: lines(body[low - 1]), name: lines(*body)}),),
            {name: lines(*body)},
            answer=body[low - 1],
        )
    high = draw.number(8, 12)
    want = body[low - 1 : high][::-1]
    return Spec(
        f"Save lines {low} to {high} of {name}, in reverse order, to {out}.",
        (f"sed -n {low},{high}p {name} | tac > {out}",),
        (f"sed -n {low},{high - 1}p {name} | tac > {out}",),
        (texts({out: lines(*want), name: lines(*body)}),),
        {name: lines(*body)},
        answer=" ".join(want),
    )


def count_unique(draw: Draw) -> Spec:
    name, out = draw.words(2)
    if draw.difficulty == 1:
        words = draw.words(draw.number(2, 6))
        body = draw.shuffled(words + words[:2])
        wording = draw.choice(
            (
                "Count the different lines of {f} into {o}.",
                "How many unique lines has {f}? Write {o}.",
            )
        )
        return Spec(
            wording.format(f=name, o=out),
            (f"sort -u {name} | wc -l > {out}",),
            (f"wc -l < {name} > {out}",),
            (answer(out, len(words)), texts({name: lines(*body)})),
            {name: lines(*body)},
            answer=str(len(words)),
        )
    words = draw.words(4)
    body = draw.shuffled([words[0]] * 4 + [words[1]] * 3 + words[2:] + [words[2]])
    if draw.difficulty == 2:
        wording = draw.choice(
            (
                "Write the most common line of {f} to {o}.",
                "Which line is most often in {f}? Write to {o}.",
            )
        )
        return Spec(
            wording.format(f=name, o=out),
            (f"sort {name} | uniq -c | sort -n | tail -n 1 | tr -s ' ' | cut -d' ' -f3 > {out}",),
            (f"sort {name} | uniq -c | sort -n | head -n 1 | tr -s ' ' | cut -d' ' -f3 > {out}",),
            (answer(out, words[0]), texts({name: lines(*body)})),
            {name: lines(*body)},
            answer=words[0],
        )
    return Spec(
        f"Write each line of {name} that occurs exactly once to {out}.",
        (f"sort {name} | uniq -u > {out}",),
        (f"sort {name} | uniq > {out}",),
        (answer(out, words[3]), texts({name: lines(*body)})),
        {name: lines(*body)},
        answer=words[3],
    )


FAMILIES = (
    Family("replace_word", "replace words with sed", replace_word),
    Family("delete_lines", "delete lines by word, comment or emptiness", delete_lines),
    Family("grep_lines", "select lines into a file", grep_lines),
    Family("count_lines", "count lines or words into a file", count_lines),
    Family("sort_lines", "sort, unique and numeric", sort_lines),
    Family("take_lines", "first, last or numbered lines", take_lines),
    Family("count_unique", "distinct, most common and single lines", count_unique),
)
