"""Find files by size, by content and by name."""

from envs.tasks.procedural.checks import answer, gone, listing, texts
from envs.tasks.procedural.draw import Draw
from envs.tasks.procedural.family import Family, Spec, lines


def find_size(draw: Draw) -> Spec:
    if draw.difficulty == 1:
        out, *names = draw.words(4)
        sizes = draw.shuffled([1, 2, 3])
        files = {n: lines(*draw.words(size)) for n, size in zip(names, sizes, strict=True)}
        want = max(files, key=lambda name: len(files[name]))
        wording = draw.choice(
            (
                "Write the name of the biggest file to {o}.",
                "Which file is largest? Write its name to {o}.",
            )
        )
        # The third word is at least 3 letters long and the others at most 6: sizes differ.
        files[want] += lines(draw.word(6), draw.word(6))
        return Spec(
            wording.format(o=out),
            (f"ls -S | head -n 1 > {out}",),
            (f"ls | tail -n 1 > {out}" if want != max(names) else f"ls | head -n 1 > {out}",),
            (answer(out, want), texts(files)),
            files,
            answer=want,
        )
    folder, fill = draw.words(2)
    limit = draw.number(30, 90)
    names = draw.words(5)
    sizes = [limit - 12, limit, limit + 1, limit + 15, limit + 40]
    files = {
        f"{folder}/{name}": (fill * 40)[: size - 1] + "\n"
        for name, size in draw.shuffled(list(zip(names, sizes, strict=True)))
    }
    if draw.difficulty == 2:
        big = [f"{folder}/{name}" for name in names[2:]]
        return Spec(
            draw.choice(
                (
                    "Delete files of {d} larger than {n} bytes.",
                    "In {d}, remove files over {n} bytes.",
                )
            ).format(d=folder, n=limit),
            (f"find {folder} -type f -size +{limit}c -exec rm {{}} +",),
            (f"find {folder} -type f -size -{limit}c -exec rm {{}} +",),
            (gone(*big), texts({path: files[path] for path in files if path not in big})),
            files,
        )
    target = draw.word()
    moved = {f"{target}/{name}": files[f"{folder}/{name}"] for name in names[3:]}
    kept = {f"{folder}/{name}": files[f"{folder}/{name}"] for name in names[:3]}
    return Spec(
        f"Move the two biggest files of {folder} to a new directory {target}.",
        (f"mkdir {target}; cd {folder}", f"mv $(ls -S | head -n 2) ../{target}"),
        (f"mkdir {target}; cd {folder}", f"mv $(ls -S | head -n 1) ../{target}"),
        (listing(folder, names[:3]), listing(target, names[3:]), texts(moved | kept)),
        files,
    )


def find_content(draw: Draw) -> Spec:
    key, *names = draw.words(5)
    if draw.difficulty == 1:
        victim, *others = names[:3]
        files = {n: lines(draw.word()) for n in others} | {victim: lines(key)}
        files = {n: files[n] for n in draw.shuffled(list(files))}
        wording = draw.choice(
            ("Delete the file that contains {w}.", "Remove the file with {w} in it.")
        )
        return Spec(
            wording.format(w=key),
            (f"rm $(grep -l {key} *)",),
            (f"rm {others[0]}",),
            (gone(victim), texts({n: files[n] for n in others})),
            files,
        )
    folder = draw.word()
    bodies = [[key], [draw.word(), f"{draw.word()} {key}"], [draw.word()], draw.words(2)]
    files = {f"{folder}/{n}": lines(*b) for n, b in zip(names, bodies, strict=True)}
    if draw.difficulty == 2:
        target = draw.word()
        moved = {f"{target}/{n}": files[f"{folder}/{n}"] for n in names[:2]}
        kept = {f"{folder}/{n}": files[f"{folder}/{n}"] for n in names[2:]}
        return Spec(
            draw.choice(
                (
                    "Move all files of {d} with {w} in them to {t}.",
                    "Move files of {d} with {w} to {t}.",
                )
            ).format(d=folder, w=key, t=target),
            (f"mv $(grep -l {key} {folder}/*) {target}",),
            (f"mv {folder}/* {target}",),
            (listing(folder, names[2:]), listing(target, names[:2]), texts(moved | kept)),
            files,
            setup=f"mkdir {target}",
        )
    out, sub, deep = draw.words(3)
    path = f"{folder}/{sub}/{deep}"
    files[path] = lines(draw.word(), key)
    want = sorted([f"{folder}/{n}" for n in names[:2]] + [path])
    return Spec(
        f"List the paths of all files under {folder} that contain {key}, sorted, in {out}.",
        (f"grep -rl {key} {folder} | sort > {out}",),
        (f"grep -l {key} {folder}/* | sort > {out}",),
        (texts({out: lines(*want)} | files),),
        files,
        answer=" ".join(want),
    )


def find_name(draw: Draw) -> Spec:
    name, out, *folders = draw.words(5)
    if draw.difficulty == 1:
        where = draw.choice(folders)
        files = {f"{d}/{name if d == where else draw.word()}": lines(draw.word()) for d in folders}
        wording = draw.choice(
            ("Write the path of file {f} to {o}.", "Where is {f}? Write its path to {o}.")
        )
        return Spec(
            wording.format(f=name, o=out),
            (f"find . -name {name} > {out}",),
            (f"echo {name} > {out}",),
            (answer(out, f"{where}/{name}"), texts(files)),
            files,
            answer=f"{where}/{name}",
        )
    a, b, c = folders
    if draw.difficulty == 2:
        where = draw.choice((f"{a}/{b}", f"{a}/{c}"))
        files = {f"{a}/{b}/{draw.word()}": lines(draw.word()), f"{a}/{c}/{draw.word()}": "x\n"}
        files[f"{where}/{name}"] = lines(draw.word())
        kept = {p: t for p, t in files.items() if p != f"{where}/{name}"}
        return Spec(
            draw.choice(
                (
                    "Find the file {f} under {a} and move it here.",
                    "Move {f} from somewhere in {a} here.",
                )
            ).format(f=name, a=a),
            (f"mv $(find {a} -name {name}) .",),
            (f"cp $(find {a} -name {name}) .",),
            (gone(f"{where}/{name}"), texts({name: files[f"{where}/{name}"]} | kept)),
            files,
        )
    ext, count = draw.word(3), draw.number(2, 9)
    depths = (a, f"{a}/{b}", f"{a}/{b}/{c}")
    paths = [f"{depths[i % 3]}/{draw.word()}.{ext}" for i in range(count)]
    files = {p: lines(draw.word()) for p in [*paths, f"{a}/{draw.word()}", f"{a}/{b}/{ext}"]}
    return Spec(
        f"Count the .{ext} files in {a} and all directories below it; write the count to {out}.",
        (f"find {a} -name '*.{ext}' | wc -l > {out}",),
        (f"ls {a}/*.{ext} | wc -l > {out}",),
        (answer(out, count), texts(files)),
        files,
        answer=str(count),
    )


FAMILIES = (
    Family("find_size", "find files by size", find_size),
    Family("find_content", "find files by content", find_content),
    Family("find_name", "find files by name in a tree", find_name),
)
