"""Numbers, CSV, JSON and logs."""

import json

from envs.tasks.procedural.checks import answer, same, texts
from envs.tasks.procedural.draw import Draw
from envs.tasks.procedural.family import Family, Spec, lines


def sum_numbers(draw: Draw) -> Spec:
    name, out = draw.words(2)
    if draw.difficulty == 1:
        values = draw.numbers(2 + draw.below(3), 10, 60)
        wording = draw.choice(
            (
                "Sum the numbers in {f} into {o}.",
                "Write the sum of {f} to {o}.",
                "Add up {f}; write the sum to {o}.",
            )
        )
        return Spec(
            wording.format(f=name, o=out),
            (f"awk '{{s+=$1}}END{{print s}}' {name}>{out}",),
            (f"awk '{{s=$1}}END{{print s}}' {name}>{out}",),
            (answer(out, sum(values)), texts({name: lines(*values)})),
            {name: lines(*values)},
            answer=str(sum(values)),
        )
    if draw.difficulty == 2:
        small, large = draw.numbers(2, 2, 9), draw.numbers(3, 10, 400)
        # A small number with a large first digit fools a sort by letters.
        values = draw.shuffled([*small, *large])
        least = draw.below(2)
        want = min(values) if least else max(values)
        tool, wrong = ("head", "tail") if least else ("tail", "head")
        wording = draw.choice(
            ("Write the {k} number of {f} to {o}.", "Find the {k} number in {f}; write it to {o}.")
        )
        return Spec(
            wording.format(k="smallest" if least else "largest", f=name, o=out),
            (f"sort -n {name} | {tool} -n 1 > {out}",),
            (f"sort -n {name} | {wrong} -n 1 > {out}",),
            (answer(out, want), texts({name: lines(*values)})),
            {name: lines(*values)},
            answer=str(want),
        )
    folder, key, other = draw.words(3)
    values = draw.numbers(6, 10, 90)
    rows = [f"{key if i % 2 else other} {value}" for i, value in enumerate(values)]
    files = {f"{folder}/{name}": lines(*rows[:4]), f"{folder}/{draw.word()}": lines(*rows[4:])}
    want = sum(values[1::2])
    return Spec(
        f"Sum the numbers after {key} in the files of {folder}; write the sum to {out}.",
        (f"cat {folder}/* | awk '/{key}/{{s+=$2}}END{{print s}}' > {out}",),
        (f"cat {folder}/* | awk '{{s+=$2}}END{{print s}}' > {out}",),
        (answer(out, want), texts(files)),
        files,
        answer=str(want),
    )


def add_files(draw: Draw) -> Spec:
    a, b, out = draw.words(3, 4)
    one, two = draw.numbers(2, 11, 70)
    if draw.difficulty == 1:
        files = {a: lines(one), b: lines(two)}
        wording = draw.choice(
            (
                "Write the sum of the numbers in {a} and {b} to {o}.",
                "Add the numbers in {a} and {b} into {o}.",
            )
        )
        return Spec(
            wording.format(a=a, b=b, o=out),
            (f"echo $(($(cat {a})+$(cat {b})))>{out}",),
            (f"echo $(($(cat {a})-$(cat {b})))>{out}",),
            (answer(out, one + two), texts(files)),
            files,
            answer=str(one + two),
        )
    if draw.difficulty == 2:
        c, factor = draw.word(), draw.number(2, 9)
        files = {a: lines(one), b: lines(factor), c: lines(two)}
        return Spec(
            draw.choice(
                (
                    "Write {a} times {b} plus {c} (their numbers) to {o}.",
                    "Compute {a} * {b} + {c} from the numbers in these files into {o}.",
                )
            ).format(a=a, b=b, c=c, o=out),
            (f"echo $(($(cat {a})*$(cat {b})+$(cat {c}))) > {out}",),
            (f"echo $(($(cat {a})*($(cat {b})+$(cat {c})))) > {out}",),
            (answer(out, one * factor + two), texts(files)),
            files,
            answer=str(one * factor + two),
        )
    folder, step = draw.word(), draw.number(2, 20)
    values = [one, two, draw.number(71, 99)]
    paths = [f"{folder}/{word}" for word in (a, b, out)]
    files = {path: lines(value) for path, value in zip(paths, values, strict=True)}
    return Spec(
        f"Each file of {folder} holds a number. Add {step} to every one of them, in place.",
        (f"for f in {folder}/*; do n=$(cat $f); echo $((n+{step})) > $f; done",),
        (f"for f in {folder}/*; do echo {step} >> $f; done",),
        (texts({p: lines(v + step) for p, v in zip(paths, values, strict=True)}),),
        files,
    )


def csv_column(draw: Draw) -> Spec:
    name, out = draw.words(2)
    source = f"{name}.csv"
    if draw.difficulty == 1:
        column = draw.number(2, 4)
        rows = [draw.words(4, 3) for _ in range(2 + draw.below(2))]
        files = {source: lines(*(",".join(row) for row in rows))}
        want = [row[column - 1] for row in rows]
        wording = draw.choice(
            (
                "Save column {n} of {f} to {o}.",
                "Write column {n} of {f} to {o}.",
                "Cut column {n} of {f} into {o}.",
            )
        )
        return Spec(
            wording.format(n=column, f=source, o=out),
            (f"cut -d, -f{column} {source} > {out}",),
            (f"cut -d, -f{column - 1} {source} > {out}",),
            (texts({out: lines(*want)} | files),),
            files,
            answer=" ".join(want),
        )
    key, other, *names = draw.words(7)
    values = draw.numbers(5, 10, 80)
    kinds = draw.shuffled([key, key, key, other, other])
    rows = [[n, k, str(v)] for n, k, v in zip(names, kinds, values, strict=True)]
    body = ",".join(("name", "kind", "price")) + "\n" + lines(*(",".join(row) for row in rows))
    if draw.difficulty == 2:
        want = [row[0] for row in rows if row[1] == key]
        return Spec(
            draw.choice(
                (
                    "Save the names of kind {k} in {f} to {o}.",
                    "Write column 1 of the rows of {f} whose kind is {k} to {o}.",
                )
            ).format(k=key, f=source, o=out),
            (f"awk -F, '$2==\"{key}\"{{print $1}}' {source} > {out}",),
            (f"cut -d, -f1 {source} > {out}",),
            (texts({out: lines(*want), source: body}),),
            {source: body},
            answer=" ".join(want),
        )
    want_sum = sum(int(row[2]) for row in rows if row[1] == key)
    return Spec(
        f"In {source}, sum the price of all rows of kind {key}; write the sum to {out}.",
        (f"awk -F, '$2==\"{key}\"{{s+=$3}}END{{print s}}' {source} > {out}",),
        (f"awk -F, '{{s+=$3}}END{{print s}}' {source} > {out}",),
        (answer(out, want_sum), texts({source: body})),
        {source: body},
        answer=str(want_sum),
    )


def json_field(draw: Draw) -> Spec:
    name, out, key, other, value, wrong = draw.words(6)
    source = f"{name}.json"
    if draw.difficulty == 1:
        pairs = draw.shuffled([(key, value), (other, wrong)])
        files = {source: json.dumps(dict(pairs)) + "\n"}
        wording = draw.choice(
            (
                "Write field {k} of {f} to {o}.",
                "Save the value of {k} in {f} to {o}.",
                "Put {k} of {f} into {o}.",
            )
        )
        return Spec(
            wording.format(k=key, f=source, o=out),
            (f"jq -r .{key} {source} > {out}",),
            (f"jq -r .{other} {source} > {out}",),
            (answer(out, value), texts(files)),
            files,
            answer=value,
        )
    if draw.difficulty == 2:
        names = draw.words(4)
        kinds = draw.shuffled([value, value, wrong, wrong])
        rows = [{key: n, other: k} for n, k in zip(names, kinds, strict=True)]
        files = {source: json.dumps(rows) + "\n"}
        want = [row[key] for row in rows if row[other] == value]
        return Spec(
            f"From the list in {source}, write {key} of all items with {other} {value} to {out}.",
            (f"jq -r '.[]|select(.{other}==\"{value}\").{key}' {source} > {out}",),
            (f"jq -r '.[].{key}' {source} > {out}",),
            (texts({out: lines(*want)} | files),),
            files,
            answer=" ".join(want),
        )
    before = {other: {key: wrong, draw.word(): draw.number(2, 90)}, draw.word(): [draw.word()]}
    after = json.loads(json.dumps(before))
    after[other][key] = value
    return Spec(
        f"In {source}, set {key} inside {other} to {value}; keep the rest.",
        (f"jq '.{other}.{key}=\"{value}\"' {source} > tmp", f"mv tmp {source}"),
        (f"jq '.{key}=\"{value}\"' {source} > tmp", f"mv tmp {source}"),
        (same(f"jq -cS . {source}", json.dumps(after, sort_keys=True, separators=(",", ":"))),),
        {source: json.dumps(before) + "\n"},
    )


def read_log(draw: Draw) -> Spec:
    name, out = draw.words(2)
    source = f"{name}.log"
    if draw.difficulty == 1:
        errors, users = draw.number(2, 7), draw.words(3)
        body = draw.shuffled(
            [f"ERROR {draw.choice(users)}" for _ in range(errors)]
            + [f"INFO {user}" for user in users]
        )
        wording = draw.choice(
            (
                "Count the ERROR lines of {f} into {o}.",
                "How many errors in {f}? Write to {o}.",
                "Write the number of ERRORs in {f} to {o}.",
            )
        )
        return Spec(
            wording.format(f=source, o=out),
            (f"grep -c ERROR {source} > {out}",),
            (f"wc -l < {source} > {out}",),
            (answer(out, errors), texts({source: lines(*body)})),
            {source: lines(*body)},
            answer=str(errors),
        )
    users = draw.words(8)
    levels = ["ERROR", *draw.shuffled(["ERROR", "ERROR", "WARN", "INFO", "INFO", "WARN"]), "INFO"]
    hour, minutes = 10 + draw.below(10), sorted(draw.numbers(8, 10, 59))
    rows = [f"{hour}:{m} {k} {u}" for m, k, u in zip(minutes, levels, users, strict=True)]
    errors_at = [i for i, level in enumerate(levels) if level == "ERROR"]
    if draw.difficulty == 2:
        want = users[errors_at[-1]]
        return Spec(
            draw.choice(
                (
                    "Write the user (last word) of the last ERROR in {f} to {o}.",
                    "Who had the last ERROR in {f}? Write the name to {o}.",
                )
            ).format(f=source, o=out),
            (f"grep ERROR {source} | tail -n 1 | cut -d' ' -f3 > {out}",),
            (f"grep ERROR {source} | head -n 1 | cut -d' ' -f3 > {out}",),
            (answer(out, want), texts({source: lines(*rows)})),
            {source: lines(*rows)},
            answer=want,
        )
    start = minutes[1]
    after = [users[i] for i in errors_at if minutes[i] >= start]
    return Spec(
        f"Write the users of all ERRORs in {source} at {hour}:{start} or later to {out}.",
        (f'awk \'$1>="{hour}:{start}"&&$2=="ERROR"{{print $3}}\' {source} > {out}',),
        (f"awk '$2==\"ERROR\"{{print $3}}' {source} > {out}",),
        (texts({out: lines(*after), source: lines(*rows)}),),
        {source: lines(*rows)},
        answer=" ".join(after),
    )


FAMILIES = (
    Family("sum_numbers", "sums, extremes and conditional sums", sum_numbers),
    Family("add_files", "arithmetic over numbers kept in files", add_files),
    Family("csv_column", "select from and aggregate CSV", csv_column),
    Family("json_field", "read, filter and edit JSON", json_field, ("jq",)),
    Family("read_log", "count and extract from logs", read_log),
)
