"""Multi-turn families: what to do next is only known from the output of the last command."""

from itertools import pairwise

from envs.tasks.procedural.checks import answer, dirs, gone, listing, mode, texts
from envs.tasks.procedural.draw import Draw
from envs.tasks.procedural.family import Family, Spec, lines


def follow_note(draw: Draw) -> Spec:
    """A note names the file to act on."""
    note, target, word, folder = draw.words(4)
    if draw.difficulty == 1:
        wording = draw.choice(
            ("Make the file that {f} names.", "Read {f}; create the file it names.")
        )
        return Spec(
            wording.format(f=note),
            (f"cat {note}", f"touch {target}"),
            (f"cat {note}", f"touch {word}"),
            (texts({note: lines(target), target: ""}),),
            {note: lines(target)},
            answer=target,
        )
    if draw.difficulty == 2:
        files = {note: lines(f"dir {folder}", f"file {target}")}
        return Spec(
            draw.choice(
                (
                    "Write {w} to the file that {f} describes.",
                    "Read {f}; make that directory and file with text {w}.",
                )
            ).format(w=word, f=note),
            (f"cat {note}", f"mkdir {folder}; echo {word} > {folder}/{target}"),
            (f"cat {note}", f"mkdir {folder}; echo {target} > {folder}/{word}"),
            (texts({f"{folder}/{target}": lines(word)} | files),),
            files,
            answer=f"{folder} {target}",
        )
    other, second = draw.words(2)
    files = {note: lines(f"dir {folder}"), other: lines(f"file {target}"), second: lines(word)}
    return Spec(
        f"{note} names a directory, {other} a file in it: make both, with the text of {second}.",
        (
            f"cat {note} {other}",
            f"cat {second}",
            f"mkdir {folder}",
            f"echo {word} > {folder}/{target}",
        ),
        (f"cat {note} {other}", f"mkdir {folder}", f"echo {second} > {folder}/{target}"),
        (texts({f"{folder}/{target}": lines(word)} | files),),
        files,
        answer=f"{folder} {target} {word}",
    )


def obey_note(draw: Draw) -> Spec:
    """A file holds the real instruction."""
    note, a, b, c = draw.words(4)
    kept = {b: lines(draw.word())}
    # text, solution, wrong, checks, files
    orders: tuple[tuple[str, str, str, tuple[str, ...], dict[str, str]], ...] = (
        (f"Make directory {a}.", f"mkdir {a}", f"touch {a}", (dirs(a),), {}),
        (f"Delete {a}.", f"rm {a}", f"rm {b}", (gone(a),), {a: lines(draw.word())}),
        (
            f"Write {c} to {a}.",
            f"echo {c} > {a}",
            f"echo {a} > {c}",
            (texts({a: lines(c)}),),
            {},
        ),
        (
            f"Rename {a} to {c}.",
            f"mv {a} {c}",
            f"cp {a} {c}",
            (gone(a), texts({c: lines(note)})),
            {a: lines(note)},
        ),
    )
    text, solution, wrong, checks, files = draw.choice(orders)
    wording = draw.choice(("Do what {f} says.", "Follow the order in {f}.", "Read {f} and do it."))
    if draw.difficulty == 1:
        all_files = {note: lines(text), **files, **kept}
        return Spec(
            wording.format(f=note),
            (f"cat {note}", solution),
            (f"cat {note}", wrong),
            (*checks, texts({note: lines(text)} | kept)),
            all_files,
        )
    extra, word = draw.words(2)
    if draw.difficulty == 2:
        body = lines(text, f"Append {word} to {b}.")
        return Spec(
            wording.format(f=note),
            (f"cat {note}", solution, f"echo {word} >> {b}"),
            (f"cat {note}", solution, f"echo {word} > {b}"),
            (*checks, texts({note: body, b: kept[b] + lines(word)})),
            {note: body, **files, **kept},
        )
    notes = {
        f"{word}/{note}": lines(text, f"Then do what {extra} says."),
        extra: lines(f"Append {b} to {b}."),
    }
    return Spec(
        f"The only file in {word} holds an order: do it.",
        (f"ls {word}", f"cat {word}/{note}", solution, f"cat {extra}", f"echo {b} >> {b}"),
        (f"ls {word}", f"cat {word}/{note}", solution),
        (*checks, texts(notes | {b: kept[b] + lines(b)})),
        {**notes, **files, **kept},
    )


def follow_chain(draw: Draw) -> Spec:
    """Files point to files; the last holds a word."""
    hops = draw.difficulty + 1
    out, word, wrong, decoy, *names = draw.words(4 + hops)
    if draw.difficulty > 1:
        folder = draw.word()
        names = [names[0], *(f"{folder}/{name}" for name in names[1:])]
        decoy = f"{folder}/{decoy}"
    files = {a: lines(f"see {b}") for a, b in pairwise(names)}
    files |= {names[-1]: lines(f"word {word}"), decoy: lines(f"word {wrong}")}
    wording = draw.choice(
        ("Follow {f} to a word; write it to {o}.", "{f} leads to a word: write it to {o}.")
    )
    reading = tuple(f"cat {name}" for name in names)
    return Spec(
        wording.format(f=names[0], o=out),
        (*reading, f"echo {word} > {out}"),
        (*reading, f"echo {wrong} > {out}"),
        (answer(out, word), texts(files)),
        files,
        answer=word,
    )


def rename_found(draw: Draw) -> Spec:
    """A listing shows the name to act on."""
    found, new, folder, other = draw.words(4)
    text = lines(draw.word())
    if draw.difficulty == 1:
        wording = draw.choice(
            (
                "Rename the file here to {b}.",
                "Name the only file {b}.",
                "Rename the one file to {b}.",
            )
        )
        return Spec(
            wording.format(b=new),
            ("ls", f"mv {found} {new}"),
            ("ls", f"cp {found} {new}"),
            (gone(found), texts({new: text})),
            {found: text},
            answer=found,
        )
    if draw.difficulty == 2:
        return Spec(
            draw.choice(
                (
                    "Rename the file in {d} to {b}, still in {d}.",
                    "In {d}, rename the only file to {b}.",
                )
            ).format(d=folder, b=new),
            (f"ls {folder}", f"mv {folder}/{found} {folder}/{new}"),
            (f"ls {folder}", f"mv {folder}/{found} {new}"),
            (
                gone(f"{folder}/{found}"),
                listing(folder, (new,)),
                texts({f"{folder}/{new}": text, other: text}),
            ),
            {f"{folder}/{found}": text, other: text},
            answer=found,
        )
    ext = draw.word(3)
    decoys = {f"{folder}/{name}.{ext}": lines(name) for name in draw.words(3)}
    return Spec(
        f"One file in {folder} has no .{ext} ending: give it that ending.",
        (f"ls {folder}", f"mv {folder}/{found} {folder}/{found}.{ext}"),
        (f"ls {folder}", f"cp {folder}/{found} {folder}/{found}.{ext}"),
        (gone(f"{folder}/{found}"), texts({f"{folder}/{found}.{ext}": text} | decoys)),
        {f"{folder}/{found}": text} | decoys,
        answer=found,
    )


def fix_script(draw: Draw) -> Spec:
    """A script says what it lacks, one thing at a time."""
    script, a, b, c = draw.words(4)
    need_file = f"[ -f {a} ] || {{ echo need file {a}; exit 1; }}"
    need_dir = f"[ -d {b} ] || {{ echo need dir {b}; exit 1; }}"
    need_text = f'[ "$(cat {b}/{c} 2>/dev/null)" = {a} ] || {{ echo need {a} in {b}/{c}; exit 1; }}'
    need_mode = f"[ -x {a} ] || {{ echo need {a} executable; exit 1; }}"
    wording = draw.choice(
        ("Make sh {f} succeed.", "Fix what sh {f} lacks.", "Get sh {f} to say ok.")
    )
    wanted = {
        1: [draw.choice((need_file, need_dir))],
        2: [need_file, need_dir],
        3: [need_file, need_dir, need_text, need_mode],
    }[draw.difficulty]
    repair = {
        need_file: (f"touch {a}", texts({a: ""})),
        need_dir: (f"mkdir {b}", dirs(b)),
        need_text: (f"echo {a} > {b}/{c}", texts({f"{b}/{c}": lines(a)})),
        need_mode: (f"chmod +x {a}", mode("-100", a)),
    }
    body = lines(*wanted, "echo ok")
    steps = tuple(step for need in wanted for step in (f"sh {script}", repair[need][0]))
    near = {1: (f"sh {script}", f"touch {c}"), 2: steps[:2], 3: steps[:-2]}[draw.difficulty]
    # An empty file is asked for, but one with text in it satisfies the script as well.
    checks = [f"regular {a} || exit 1" if n == need_file else repair[n][1] for n in wanted]
    return Spec(
        wording.format(f=script),
        steps,
        near,
        (texts({script: body}), *checks),
        {script: body},
    )


def look_up(draw: Draw) -> Spec:
    """A key from one file is looked up in another."""
    source, table, out, *words = draw.words(9)
    keys, values = words[:3], words[3:]
    key, value = keys[0], values[0]
    pairs = draw.shuffled(list(zip(keys, values, strict=True)))
    rows = [f"{k} {v}" for k, v in pairs]
    files = {source: lines(key), table: lines(*rows)}
    if draw.difficulty == 1:
        wording = draw.choice(
            (
                "Look up {s}'s word in {t}; write it to {o}.",
                "Find the word of {s} in {t}; value to {o}.",
            )
        )
        return Spec(
            wording.format(s=source, t=table, o=out),
            (f"cat {source}", f"grep {key} {table}", f"echo {value} > {out}"),
            (f"cat {source}", f"grep {key} {table}", f"echo {values[1]} > {out}"),
            (answer(out, value), texts(files)),
            files,
            answer=value,
        )
    second, *finals = draw.words(4)
    chain = draw.shuffled([f"{v} {w}" for v, w in zip(values, finals, strict=True)])
    files[second] = lines(*chain)
    steps = (f"cat {source}", f"grep {key} {table}", f"grep {value} {second}")
    if draw.difficulty == 2:
        return Spec(
            f"Look up {source}'s word in {table}, the result in {second}; write the last to {out}.",
            (*steps, f"echo {finals[0]} > {out}"),
            (*steps, f"echo {value} > {out}"),
            (answer(out, finals[0]), texts(files)),
            files,
            answer=finals[0],
        )
    files[finals[0]] = lines(draw.word())
    files[finals[1]] = lines(draw.word())
    kept = {path: text for path, text in files.items() if path != finals[0]}
    return Spec(
        f"Look up {source}'s word in {table}, the result in {second}; rename that file to {out}.",
        (*steps, f"mv {finals[0]} {out}"),
        (*steps, f"mv {finals[1]} {out}"),
        (gone(finals[0]), texts({out: files[finals[0]]} | kept)),
        files,
        answer=finals[0],
    )


def branch_on(draw: Draw) -> Spec:
    """A file decides which of two actions is right."""
    note, a, b = draw.words(3)
    yes = draw.below(2) == 0
    files = {note: lines("yes" if yes else "no"), a: lines(draw.word()), b: lines(draw.word())}
    victim, kept = (a, b) if yes else (b, a)
    if draw.difficulty == 1:
        wording = draw.choice(
            ("If {n} says yes, delete {a}, else {b}.", "Delete {a} if {n} says yes, else {b}.")
        )
        return Spec(
            wording.format(n=note, a=a, b=b),
            (f"cat {note}", f"rm {victim}"),
            (f"cat {note}", f"rm {kept}"),
            (gone(victim), texts({p: files[p] for p in (note, kept)})),
            files,
        )
    low, high = sorted(draw.numbers(2, 10, 99))
    files[note] = lines(high if yes else low)
    limit = (low + high + 1) // 2
    if draw.difficulty == 2:
        new = draw.word()
        return Spec(
            f"If the number in {note} is {limit} or more rename {a} to {new}, else rename {b}.",
            (f"cat {note}", f"mv {victim} {new}"),
            (f"cat {note}", f"mv {kept} {new}"),
            (gone(victim), texts({new: files[victim], note: files[note], kept: files[kept]})),
            files,
        )
    one, two = draw.words(2)
    lengths = (3, 2) if yes else (2, 3)
    for path, count in zip((a, b), lengths, strict=True):
        files[path] = lines(*draw.words(count))
    return Spec(
        f"Append {one} to {a} and {b}, whichever has more lines; append {two} to the other.",
        (f"wc -l {a} {b}", f"echo {one} >> {victim}", f"echo {two} >> {kept}"),
        (f"wc -l {a} {b}", f"echo {two} >> {victim}", f"echo {one} >> {kept}"),
        (texts({victim: files[victim] + lines(one), kept: files[kept] + lines(two)}),),
        {p: files[p] for p in (a, b)},
    )


def walk_down(draw: Draw) -> Spec:
    """Directories are listed one by one down to a file."""
    top, out, leaf, *steps = draw.words(3 + draw.difficulty)
    folders = [top]
    for step in steps:
        folders.append(f"{folders[-1]}/{step}")
    path = f"{folders[-1]}/{leaf}"
    files = {path: lines(draw.word())}
    reading = tuple(f"ls {folder}" for folder in folders)
    wording = draw.choice(
        (
            "Go down {d} to a file; write its name to {o}.",
            "Find the file under {d}; its name to {o}.",
        )
    )
    return Spec(
        wording.format(d=top, o=out),
        (*reading, f"echo {leaf} > {out}"),
        (*reading, f"echo {steps[-1]} > {out}"),
        (answer(out, leaf), texts(files)),
        files,
        answer=leaf,
    )


FAMILIES = (
    Family("follow_note", "a note names the file to make", follow_note, turns=2),
    Family("obey_note", "a file holds the order", obey_note, turns=2),
    Family("follow_chain", "files point to files, the last to a word", follow_chain, turns=3),
    Family("rename_found", "a listing shows the file to rename", rename_found, turns=2),
    Family("fix_script", "a script says what it lacks", fix_script, turns=2),
    Family("look_up", "a key from one file, its value from another", look_up, turns=3),
    Family("branch_on", "a file's content decides what to do", branch_on, turns=2),
    Family("walk_down", "list directories down to a file", walk_down, turns=3),
)
