"""Files and directories: write, make, move, copy, delete, by name and by pattern."""

from envs.tasks.procedural.checks import dirs, gone, listing, texts
from envs.tasks.procedural.draw import Draw
from envs.tasks.procedural.family import Family, Spec, lines


def _notes(draw: Draw, names: list[str]) -> dict[str, str]:
    """One short file per name."""
    return {name: lines(draw.word()) for name in names}


def write_file(draw: Draw) -> Spec:
    if draw.difficulty == 1:
        name, word = draw.words(2)
        wording = draw.choice(
            ("Write {w} to {f}.", "Make a file {f} with text {w}.", "Put {w} in file {f}.")
        )
        return Spec(
            wording.format(w=word, f=name),
            (f"echo {word} > {name}",),
            (f"echo {name} > {word}",),
            (texts({name: lines(word)}),),
        )
    if draw.difficulty == 2:
        folder, name, word = draw.words(3)
        wording = draw.choice(
            ("In a new directory {d}, write {w} to {f}.", "Make {d}/{f} with text {w}.")
        )
        return Spec(
            wording.format(d=folder, w=word, f=name),
            (f"mkdir {folder}", f"echo {word} > {folder}/{name}"),
            (f"mkdir {folder}", f"echo {word} > {name}"),
            (texts({f"{folder}/{name}": lines(word)}),),
        )
    top, sub, name, *words = draw.words(6)
    path = f"{top}/{sub}/{name}"
    return Spec(
        f"Make {path} with the lines {', '.join(words)}.",
        (f"mkdir -p {top}/{sub}", f"printf '%s\\n' {' '.join(words)} > {path}"),
        (f"mkdir -p {top}/{sub}", f"echo {' '.join(words)} > {path}"),
        (texts({path: lines(*words)}),),
    )


def make_dir(draw: Draw) -> Spec:
    if draw.difficulty == 1:
        name = draw.word()
        wording = draw.choice(("Make directory {d}.", "Create a directory {d}.", "Make dir {d}."))
        return Spec(wording.format(d=name), (f"mkdir {name}",), (f"touch {name}",), (dirs(name),))
    if draw.difficulty == 2:
        a, b, c = draw.words(3)
        wording = draw.choice(("Make directory {p}.", "Make {p} and its parent directories."))
        return Spec(
            wording.format(p=f"{a}/{b}/{c}"),
            (f"mkdir -p {a}/{b}/{c}",),
            (f"mkdir {a} {b} {c}",),
            (dirs(f"{a}/{b}/{c}"),),
        )
    folder, stem = draw.words(2)
    count = draw.number(3, 12)
    names = [f"{stem}{i}" for i in range(1, count + 1)]
    return Spec(
        f"In a new directory {folder}, make directories {stem}1 to {stem}{count}.",
        (f"mkdir {folder}", f"cd {folder}; for i in $(seq {count}); do mkdir {stem}$i; done"),
        (f"mkdir {folder}", f"cd {folder}; for i in $(seq {count - 1}); do mkdir {stem}$i; done"),
        (listing(folder, names), dirs(*(f"{folder}/{name}" for name in names))),
    )


def move_file(draw: Draw) -> Spec:
    if draw.difficulty == 1:
        old, new, other = draw.words(3)
        files = _notes(draw, [old, other])
        wording = draw.choice(
            ("Rename {a} to {b}.", "Move {a} to {b}.", "Change {a}'s name to {b}.")
        )
        return Spec(
            wording.format(a=old, b=new),
            (f"mv {old} {new}",),
            (f"cp {old} {new}",),
            (gone(old), texts({new: files[old], other: files[other]})),
            files,
        )
    if draw.difficulty == 2:
        old, new, top, sub, other = draw.words(5)
        files = _notes(draw, [f"{top}/{old}", other])
        return Spec(
            draw.choice(
                (
                    "Move {t}/{a} to {s}/{b}; make {s} first.",
                    "Move {t}/{a} into new dir {s} as {b}.",
                )
            ).format(t=top, a=old, s=sub, b=new),
            (f"mkdir {sub}", f"mv {top}/{old} {sub}/{new}"),
            (f"mkdir {sub}", f"mv {top}/{old} {sub}/{old}"),
            (
                gone(f"{top}/{old}"),
                texts({f"{sub}/{new}": files[f"{top}/{old}"], other: files[other]}),
            ),
            files,
        )
    a, b, folder = draw.words(3)
    one, two = f"{folder}/{a}", f"{folder}/{b}"
    files = _notes(draw, [one, two])
    return Spec(
        draw.choice(
            ("Swap the contents of {a} and {b}.", "Exchange the files {a} and {b}.")
        ).format(a=one, b=two),
        (f"cd {folder}", f"mv {a} tmp; mv {b} {a}; mv tmp {b}"),
        (f"cd {folder}", f"mv {a} {b}; mv {b} {a}"),
        (texts({one: files[two], two: files[one]}),),
        files,
    )


def copy_file(draw: Draw) -> Spec:
    if draw.difficulty == 1:
        old, new = draw.words(2)
        files = _notes(draw, [old])
        wording = draw.choice(
            ("Copy {a} to {b}.", "Make a copy of {a} named {b}.", "Copy {a} as {b}.")
        )
        return Spec(
            wording.format(a=old, b=new),
            (f"cp {old} {new}",),
            (f"mv {old} {new}",),
            (texts({old: files[old], new: files[old]}),),
            files,
        )
    if draw.difficulty == 2:
        old, new, a, b, sub = draw.words(5)
        inside = _notes(draw, [a, f"{sub}/{b}"])
        tree = {f"{folder}/{name}": t for folder in (old, new) for name, t in inside.items()}
        return Spec(
            draw.choice(("Copy directory {a} to {b}.", "Copy all of {a} to new dir {b}.")).format(
                a=old, b=new
            ),
            (f"cp -r {old} {new}",),
            (f"mv {old} {new}",),
            (texts(tree), listing(new, (a, sub))),
            {f"{old}/{name}": text for name, text in inside.items()},
        )
    source, target, ext, other = *draw.words(2), *draw.words(2, 3)
    names = [f"{word}.{ext}" for word in draw.words(3)]
    decoys = [f"{word}.{other}" for word in draw.words(2)]
    files = _notes(draw, [f"{source}/{name}" for name in draw.shuffled(names + decoys)])
    copies = {f"{target}/{name}": files[f"{source}/{name}"] for name in names}
    return Spec(
        f"Copy only the .{ext} files of {source} into a new directory {target}.",
        (f"mkdir {target}", f"cp {source}/*.{ext} {target}"),
        (f"mkdir {target}", f"cp {source}/* {target}"),
        (listing(target, names), texts(copies | files)),
        files,
    )


def delete_file(draw: Draw) -> Spec:
    if draw.difficulty == 1:
        victim, *others = draw.words(3)
        files = _notes(draw, draw.shuffled([victim, *others]))
        wording = draw.choice(("Delete {f}.", "Remove the file {f}.", "Delete file {f}."))
        return Spec(
            wording.format(f=victim),
            (f"rm {victim}",),
            (f"rm {' '.join(files)}",),
            (gone(victim), texts({name: files[name] for name in others})),
            files,
        )
    ext, other = draw.words(2, 3)
    victims = [f"{word}.{ext}" for word in draw.words(2 + draw.below(2))]
    others = [f"{word}.{other}" for word in draw.words(2)] + [ext]
    if draw.difficulty == 2:
        files = _notes(draw, draw.shuffled(victims + others))
        return Spec(
            draw.choice(("Delete all .{e} files.", "Remove every .{e} file.")).format(e=ext),
            (f"rm *.{ext}",),
            (f"rm *{ext}",),
            (gone(*victims), texts({name: files[name] for name in others})),
            files,
        )
    top, sub = draw.words(2)
    victims = [f"{top}/{victims[0]}", *(f"{top}/{sub}/{name}" for name in victims[1:])]
    others = [f"{top}/{others[0]}", f"{top}/{sub}/{others[1]}", f"{top}/{sub}/{ext}"]
    outside = f"{draw.word()}.{ext}"
    files = _notes(draw, draw.shuffled([*victims, *others, outside]))
    return Spec(
        f"Delete all .{ext} files in {top} and below, nothing else.",
        (f"find {top} -name '*.{ext}' -exec rm {{}} +",),
        (f"rm {top}/*.{ext}",),
        (gone(*victims), texts({name: files[name] for name in [*others, outside]})),
        files,
    )


def move_pattern(draw: Draw) -> Spec:
    ext, other = draw.words(2, 3)
    stems = draw.words(2 + draw.below(2))
    names = [f"{stem}.{ext}" for stem in stems]
    decoy = f"{draw.word()}.{other}"
    if draw.difficulty == 1:
        folder = draw.word()
        files = _notes(draw, draw.shuffled([*names, decoy]))
        wording = draw.choice(
            ("Move all .{e} files to {d}/.", "Put every .{e} file in {d}/.", "Move *.{e} into {d}.")
        )
        return Spec(
            wording.format(e=ext, d=folder),
            (f"mv *.{ext} {folder}",),
            (f"cp *.{ext} {folder}",),
            (
                gone(*names),
                listing(folder, names),
                texts({f"{folder}/{name}": files[name] for name in names} | {decoy: files[decoy]}),
            ),
            files,
            setup=f"mkdir {folder}",
        )
    new = draw.word(3)
    if draw.difficulty == 2:
        files = _notes(draw, draw.shuffled([*names, decoy]))
        moved = {f"{stem}.{new}": files[f"{stem}.{ext}"] for stem in stems}
        return Spec(
            draw.choice(
                ("Rename every .{a} file to .{b}.", "Change all .{a} names to .{b}.")
            ).format(a=ext, b=new),
            (f"for f in *.{ext}; do mv $f ${{f%.{ext}}}.{new}; done",),
            (f"for f in *.{ext}; do mv $f $f.{new}; done",),
            (gone(*names), texts(moved | {decoy: files[decoy]})),
            files,
        )
    source, target, prefix = draw.words(3)
    chosen = [f"{prefix}{stem}" for stem in stems]
    rest = [f"{stem}{prefix}" for stem in draw.words(2)]
    files = _notes(draw, [f"{source}/{name}" for name in draw.shuffled(chosen + rest)])
    moved = {f"{target}/{name}": files[f"{source}/{name}"] for name in chosen}
    kept = {f"{source}/{name}": files[f"{source}/{name}"] for name in rest}
    return Spec(
        f"Move the files of {source} whose names start with {prefix} to new dir {target}.",
        (f"mkdir {target}", f"mv {source}/{prefix}* {target}"),
        (f"mkdir {target}", f"mv {source}/*{prefix}* {target}"),
        (listing(source, rest), listing(target, chosen), texts(moved | kept)),
        files,
    )


def append_line(draw: Draw) -> Spec:
    name, word, *old = draw.words(3 if draw.difficulty == 1 else 5)
    if draw.difficulty == 1:
        wording = draw.choice(
            ("Append {w} to {f}.", "Add the line {w} to {f}.", "Add {w} at the end of {f}.")
        )
        return Spec(
            wording.format(w=word, f=name),
            (f"echo {word} >> {name}",),
            (f"echo {word} > {name}",),
            (texts({name: lines(*old, word)}),),
            {name: lines(*old)},
        )
    if draw.difficulty == 2:
        wording = draw.choice(
            ("Insert {w} as the first line of {f}.", "Put the line {w} on top of {f}.")
        )
        return Spec(
            wording.format(w=word, f=name),
            (f"sed -i '1i {word}' {name}",),
            (f"echo {word} >> {name}",),
            (texts({name: lines(word, *old)}),),
            {name: lines(*old)},
        )
    mark, *rest = old
    body = [rest[0], mark, rest[1], mark, rest[0]]
    want = [item for line in body for item in ((line, word) if line == mark else (line,))]
    return Spec(
        f"In {name}, add a line {word} after every line {mark}.",
        (f"sed -i '/^{mark}$/a {word}' {name}",),
        (f"sed -i '/^{mark}$/i {word}' {name}",),
        (texts({name: lines(*want)}),),
        {name: lines(*body)},
    )


FAMILIES = (
    Family("write_file", "write given text to a new file", write_file),
    Family("make_dir", "make directories, nested and numbered", make_dir),
    Family("move_file", "rename, move and swap files", move_file),
    Family("copy_file", "copy files, trees, and files by extension", copy_file),
    Family("delete_file", "delete by name, by extension, recursively", delete_file),
    Family("move_pattern", "move and rename by extension or prefix", move_pattern),
    Family("append_line", "append, prepend and insert lines", append_line),
)
