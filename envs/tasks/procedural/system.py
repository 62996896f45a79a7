"""Permissions, links, archives, environment variables and exit codes."""

from envs.tasks.procedural.checks import answer, gone, link, listing, mode, same, texts
from envs.tasks.procedural.draw import Draw
from envs.tasks.procedural.family import Family, Spec, lines


def set_mode(draw: Draw) -> Spec:
    name, folder, *others = draw.words(5)
    if draw.difficulty == 1:
        files = {name: lines(draw.word())}
        if draw.below(2):
            return Spec(
                draw.choice(("Make {f} executable.", "Let {f} be executed.")).format(f=name),
                (f"chmod +x {name}",),
                (f"chmod 666 {name}",),
                (mode("-100", name), texts(files)),
                files,
            )
        bits = draw.choice(("600", "640", "444", "400", "755", "700", "660"))
        return Spec(
            draw.choice(("Set the mode of {f} to {m}.", "Give {f} mode {m}.")).format(
                f=name, m=bits
            ),
            (f"chmod {bits} {name}",),
            (f"chmod 646 {name}",),
            (mode(bits, name), texts(files)),
            files,
        )
    if draw.difficulty == 2:
        who, rest = draw.choice((("others", "o"), ("group", "g"), ("group and others", "go")))
        want = {"o": "664", "g": "646", "go": "644"}[rest]
        files = {name: lines(draw.word())}
        return Spec(
            draw.choice(
                (
                    "Take write permission on {f} from {w}.",
                    "On {f}, {w} must lose write permission.",
                )
            ).format(f=name, w=who),
            (f"chmod {rest}-w {name}",),
            (f"chmod a-w {name}",),
            (mode(want, name), texts(files)),
            files,
            setup=f"chmod 666 {name}",
        )
    ext = draw.word(3)
    scripts = [f"{folder}/{word}.{ext}" for word in others[:2]]
    plain = [f"{folder}/{others[2]}", f"{folder}/{name}"]
    files = {path: lines(draw.word()) for path in draw.shuffled(scripts + plain)}
    return Spec(
        f"In {folder}, set the .{ext} files to mode 750 and all other files to 600.",
        (f"chmod 600 {folder}/*", f"chmod 750 {folder}/*.{ext}"),
        (f"chmod 750 {folder}/*.{ext}", f"chmod 600 {folder}/*"),
        (mode("750", *scripts), mode("600", *plain), texts(files)),
        files,
    )


def make_link(draw: Draw) -> Spec:
    target, name, folder, other = draw.words(4)
    files = {target: lines(draw.word())}
    if draw.difficulty == 1:
        wording = draw.choice(
            ("Make {n} a symlink to {t}.", "Symlink {n} to {t}.", "Make a symlink {n} to {t}.")
        )
        return Spec(
            wording.format(n=name, t=target),
            (f"ln -s {target} {name}",),
            (f"ln {target} {name}",),
            (link(name, target), texts(files)),
            files,
        )
    if draw.difficulty == 2:
        files[f"{folder}/{other}"] = lines(draw.word())
        return Spec(
            draw.choice(
                ("In {d}, make a symlink {n} to {t}.", "Make {d}/{n} a working symlink to {t}.")
            ).format(d=folder, n=name, t=target),
            (f"ln -s ../{target} {folder}/{name}",),
            (f"ln -s {target} {folder}/{name}",),
            (link(f"{folder}/{name}", target), texts(files)),
            files,
        )
    second = draw.word()
    files[second] = lines(draw.word())
    copies = {f"{folder}/{name}": files[target], f"{folder}/{other}": files[second]}
    return Spec(
        f"Replace each symlink in {folder} by a copy of the file it leads to.",
        (f"cd {folder}", "for f in *; do cp $f tmp; mv tmp $f; done"),
        (f"cd {folder}", f"cp {name} tmp; mv tmp {name}"),
        (listing(folder, (name, other)), texts(copies | files)),
        files,
        setup=(
            f"mkdir {folder}\nln -s ../{target} {folder}/{name}\nln -s ../{second} {folder}/{other}"
        ),
    )


def archive(draw: Draw) -> Spec:
    name, out, *words = draw.words(5)
    if draw.difficulty == 1:
        other = words[0]
        files = {name: lines(draw.word()), other: lines(draw.word())}
        wording = draw.choice(
            ("Pack {f} into {o}.tar.", "Make {o}.tar with file {f} in it.", "Tar {f} into {o}.tar.")
        )
        return Spec(
            wording.format(f=name, o=out),
            (f"tar cf {out}.tar {name}",),
            (f"tar cf {out}.tar {other}",),
            (
                f"regular {out}.tar || exit 1",
                same(f"tar tf {out}.tar | sed 's,.*/,,'", name),
                same(f"tar xOf {out}.tar", files[name].strip()),
                texts(files),
            ),
            files,
        )
    if draw.difficulty == 2:
        a, b = words[:2]
        files = {a: lines(draw.word()), b: lines(draw.word())}
        return Spec(
            draw.choice(
                (
                    "Unpack {f}.tgz into a new directory {o}.",
                    "Extract {f}.tgz in new directory {o}.",
                )
            ).format(f=name, o=out),
            (f"mkdir {out}", f"tar xzf {name}.tgz -C {out}"),
            (f"mkdir {out}", f"tar xzf {name}.tgz"),
            (texts({f"{out}/{path}": text for path, text in files.items()}),),
            files,
            setup=f"tar czf {name}.tgz {a} {b}\nrm {a} {b}",
            answer=f"{a} {b}",
        )
    ext, other = draw.words(2, 3)
    chosen = [f"{name}/{word}.{ext}" for word in words]
    rest = [f"{name}/{word}.{other}" for word in draw.words(2)]
    files = {path: lines(draw.word()) for path in draw.shuffled(chosen + rest)}
    names = sorted(path.split("/")[1] for path in chosen)
    return Spec(
        f"Pack only the .{ext} files of {name} into a gzipped tar archive {out}.tgz.",
        (f"tar czf {out}.tgz {name}/*.{ext}",),
        (f"tar czf {out}.tgz {name}",),
        (
            f"regular {out}.tgz || exit 1",
            same(f"tar tzf {out}.tgz | sed 's,.*/,,' | sort", "\n".join(names)),
            same(f"tar xzOf {out}.tgz | sort", "".join(sorted(files[p] for p in chosen)).strip()),
            texts(files),
        ),
        files,
    )


def compress(draw: Draw) -> Spec:
    name, out, *words = draw.words(5)
    if draw.difficulty == 1:
        files = {name: lines(words[0])}
        wording = draw.choice(("Gzip {f}.", "Compress {f} with gzip.", "Make {f}.gz from {f}."))
        return Spec(
            wording.format(f=name),
            (f"gzip {name}",),
            (f"mv {name} {name}.gz",),
            (f"regular {name}.gz || exit 1", same(f"gzip -dc {name}.gz", words[0])),
            files,
        )
    if draw.difficulty == 2:
        return Spec(
            draw.choice(
                ("Decompress {f}.gz to {o}; keep {f}.gz.", "Unzip {f}.gz into {o}, keeping {f}.gz.")
            ).format(f=name, o=out),
            (f"gzip -dc {name}.gz > {out}",),
            (f"gzip -d {name}.gz; cp {name} {out}",),
            (
                texts({out: lines(*words)}),
                f"regular {name}.gz || exit 1",
                same(f"gzip -dc {name}.gz", "\n".join(words)),
            ),
            {name: lines(*words)},
            setup=f"gzip {name}",
            answer=" ".join(words),
        )
    ext = draw.word(3)
    chosen = [f"{name}/{word}.{ext}" for word in words[:2]]
    rest = [f"{name}/{words[2]}", f"{name}/{ext}"]
    files = {path: lines(draw.word()) for path in draw.shuffled(chosen + rest)}
    return Spec(
        f"Replace every .{ext} file in {name} by its gzipped version.",
        (f"gzip {name}/*.{ext}",),
        (f"gzip {name}/*",),
        (
            gone(*chosen),
            *(same(f"gzip -dc {path}.gz", files[path].strip()) for path in chosen),
            texts({path: files[path] for path in rest}),
        ),
        files,
    )


def read_env(draw: Draw) -> Spec:
    key, value, out, *others = draw.words(7)
    if draw.difficulty == 1:
        name = key.upper()
        wording = draw.choice(
            (
                "Write the value of ${v} to {o}.",
                "Save variable {v} to {o}.",
                "Put the value of {v} in file {o}.",
            )
        )
        return Spec(
            wording.format(v=name, o=out),
            (f"echo ${name} > {out}",),
            (f"echo {name} > {out}",),
            (answer(out, value),),
            env={name: value, others[0].upper(): others[1]},
            answer=value,
        )
    if draw.difficulty == 2:
        script = others[0]
        body = lines(f'echo "${{{key.upper()}:-none}}" | tr a-z b-za > {out}')
        shifted = "".join("a" if c == "z" else chr(ord(c) + 1) for c in value)
        return Spec(
            draw.choice(
                ("Set and export {v}={w}, then run sh {s}.", "Run sh {s} with {v}={w} exported.")
            ).format(v=key.upper(), w=value, s=script),
            (f"export {key.upper()}={value}", f"sh {script}"),
            (f"{key.upper()}={value}", f"sh {script}"),
            (answer(out, shifted), texts({script: body})),
            {script: body},
        )
    prefix, count = key.upper(), draw.number(3, 9)
    env = {f"{prefix}_{i}": value for i in range(count)}
    env |= {f"{word.upper()}_{prefix}_1": value for word in others[:2]}
    return Spec(
        f"How many environment variables have names that start with {prefix}_? Write it to {out}.",
        (f"env | grep -c ^{prefix}_ > {out}",),
        (f"env | grep -c {prefix}_ > {out}",),
        (answer(out, count),),
        env=env,
        answer=str(count),
    )


def run_script(draw: Draw) -> Spec:
    script, out, *words = draw.words(5)
    if draw.difficulty == 1:
        code = draw.number(3, 99)
        files = {script: lines(f"echo {words[0]}", f"exit {code}")}
        wording = draw.choice(
            ("Write the exit code of sh {s} to {o}.", "Run sh {s}; put its exit status in {o}.")
        )
        return Spec(
            wording.format(s=script, o=out),
            (f"sh {script}; echo $? > {out}",),
            (f"sh {script} > {out}",),
            (answer(out, code), texts(files)),
            files,
            answer=str(code),
        )
    if draw.difficulty == 2:
        one, two = words[:2]
        files = {
            script: lines("[ $# = 2 ] || { echo usage: two words; exit 1; }", 'echo "$2-$1-$2"')
        }
        return Spec(
            draw.choice(
                (
                    "Save the output of sh {s} on {a} and {b} to {o}.",
                    "Run sh {s} {a} {b}; output to {o}.",
                )
            ).format(s=script, a=one, b=two, o=out),
            (f"sh {script} {one} {two} > {out}",),
            (f"sh {script} {two} {one} > {out}",),
            (answer(out, f"{two}-{one}-{two}"), texts(files)),
            files,
            answer=f"{two}-{one}-{two}",
        )
    folder, codes = script, draw.numbers(2, 3, 50)
    paths = [f"{folder}/{word}" for word in (*words, out)]
    exits = draw.shuffled([0, 0, *codes])
    files = {path: lines(f"exit {code}") for path, code in zip(paths, exits, strict=True)}
    good = {path: text for path, text in files.items() if text == "exit 0\n"}
    return Spec(
        f"Run each script of {folder} with sh; delete those that fail.",
        (f"for f in {folder}/*; do sh $f || rm $f; done",),
        (f"for f in {folder}/*; do sh $f && rm $f; done",),
        (gone(*(path for path in files if path not in good)), texts(good)),
        files,
    )


FAMILIES = (
    Family("set_mode", "permissions, absolute and relative", set_mode),
    Family("make_link", "make and resolve symbolic links", make_link),
    Family("archive", "pack and unpack tar archives", archive, ("tar", "gzip")),
    Family("compress", "gzip and back", compress, ("gzip",)),
    Family("read_env", "read, export and count variables", read_env),
    Family("run_script", "exit codes, arguments, failing scripts", run_script),
)
