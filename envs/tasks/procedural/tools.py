"""git and SQLite."""

from envs.tasks.procedural.checks import answer, same, texts
from envs.tasks.procedural.draw import Draw
from envs.tasks.procedural.family import Family, Spec, lines

_INIT = (
    "git init -q\nprintf '[user]\\n\\tname = agent\\n\\temail = agent@localhost\\n' >> .git/config"
)


def _commit(message: str) -> str:
    return f"git add -A\ngit commit -qm {message}"


def git_commit(draw: Draw) -> Spec:
    name, other, branch, *words = draw.words(7)
    files = {name: lines(words[0])}
    if draw.difficulty == 1:
        wording = draw.choice(
            ("Commit {f} to git.", "Commit {f}.", "Add {f} to git and commit it.")
        )
        return Spec(
            wording.format(f=name),
            (f"git add {name}", f"git commit -qm {name}"),
            (f"git add {name}",),
            (same(f"git show HEAD:{name}", words[0]), texts(files)),
            files,
            setup=_INIT,
        )
    if draw.difficulty == 2:
        files[other] = lines(words[1])
        return Spec(
            draw.choice(
                (
                    "Commit only {f} with message {m}.",
                    "Make a git commit of {f} alone, message {m}.",
                )
            ).format(f=name, m=branch),
            (f"git add {name}", f"git commit -qm {branch}"),
            ("git add .", f"git commit -qm {branch}"),
            (
                same("git log --format=%s", branch),
                same("git ls-tree -r --name-only HEAD", name),
                same(f"git show HEAD:{name}", words[0]),
                texts(files),
            ),
            files,
            setup=_INIT,
        )
    versions = [f"echo {word} > {name}\n{_commit(word)}" for word in words[:3]]
    return Spec(
        f"Bring {name} back to its content in the commit with message {words[0]}; commit that.",
        ("git log --oneline", f"git checkout HEAD~2 -- {name}", f"git commit -qm {branch}"),
        ("git log --oneline", f"git checkout HEAD~1 -- {name}", f"git commit -qm {branch}"),
        (
            same(f"git show HEAD:{name}", words[0]),
            same("git rev-list --count HEAD", "4"),
            texts(files),
        ),
        setup="\n".join([_INIT, *versions]),
    )


def git_branch(draw: Draw) -> Spec:
    name, branch, other, out, *words = draw.words(7)
    if draw.difficulty == 1:
        wording = draw.choice(
            ("Switch to a new git branch {b}.", "Go to new branch {b}.", "Start git branch {b}.")
        )
        return Spec(
            wording.format(b=branch),
            (f"git checkout -qb {branch}",),
            (f"mkdir {branch}",),
            (
                same("git symbolic-ref HEAD", f"refs/heads/{branch}"),
                texts({name: lines(words[0])}),
            ),
            {name: lines(words[0])},
            setup=_INIT,
        )
    if draw.difficulty == 2:
        setup = [
            _INIT,
            _commit(words[0]),
            f"git checkout -qb {branch}\necho {words[1]} > {other}",
            _commit(words[1]),
            "git checkout -q -",
        ]
        return Spec(
            draw.choice(
                ("Merge git branch {b} into this one.", "Merge branch {b} into the current one.")
            ).format(b=branch),
            (f"git merge -q {branch}",),
            (f"git checkout -q {branch}",),
            (
                same(f"git symbolic-ref HEAD | grep -c {branch}", "0"),
                same(f"git show HEAD:{other}", words[1]),
                texts({name: lines(words[0]), other: lines(words[1])}),
            ),
            {name: lines(words[0])},
            setup="\n".join(setup),
        )
    steps = [f"echo {word} > {f}\n{_commit(word)}" for word, f in zip(words, "abc", strict=True)]
    which = draw.below(2)
    files = {letter: lines(word) for word, letter in zip(words, "abc", strict=True)}
    return Spec(
        f"Write the message of the {('first', 'second')[which]} git commit to {out}.",
        ("git log --format=%s", f"echo {words[which]} > {out}"),
        ("git log --format=%s", f"echo {words[2]} > {out}"),
        (answer(out, words[which]), texts(files)),
        setup="\n".join([_INIT, *steps]),
        answer=words[which],
    )


def _table(database: str, name: str, columns: str, rows: list[str]) -> str:
    """Set-up lines that make a table; no fsync, one transaction."""
    values = ",".join(f"({row})" for row in rows)
    return (
        f"sqlite3 {database} <<'END'\npragma synchronous=off;\n"
        f"create table {name}({columns}); insert into {name} values{values};\nEND"
    )


def sqlite_query(draw: Draw) -> Spec:
    base, table, out = draw.words(3, 4)
    database = f"{base}.db"
    if draw.difficulty == 1:
        words = draw.words(2 + draw.below(2))
        wording = draw.choice(
            ("Save table {t} of {d} to {o}.", "Write the rows of {t} in {d} to {o}.")
        )
        return Spec(
            wording.format(t=table, d=database, o=out),
            (f"sqlite3 {database} 'select*from {table}'>{out}",),
            (f"sqlite3 {database} .schema>{out}",),
            (texts({out: lines(*words)}),),
            setup=_table(database, table, "word text", [f"'{w}'" for w in words]),
            answer=" ".join(words),
        )
    names, values = draw.words(5), draw.numbers(5, 10, 95)
    key, other = draw.words(2)
    kinds = draw.shuffled([key, key, key, other, other])
    rows = [f"'{n}','{k}',{v}" for n, k, v in zip(names, kinds, values, strict=True)]
    setup = _table(database, table, "name text, kind text, price int", rows)
    if draw.difficulty == 2:
        limit = sorted(values)[2]
        want = sorted(n for n, v in zip(names, values, strict=True) if v > limit)
        return Spec(
            f"From {table} in {database}, write names with price over {limit} to {out}, sorted.",
            (
                f"sqlite3 {database} 'select name from {table} where price>{limit} "
                f"order by name' > {out}",
            ),
            (
                f"sqlite3 {database} 'select name from {table} where price>={limit} "
                f"order by name' > {out}",
            ),
            (texts({out: lines(*want)}),),
            setup=setup,
            answer=" ".join(want),
        )
    total = sum(v for k, v in zip(kinds, values, strict=True) if k == key)
    return Spec(
        f"From {table} in {database}, write the total price of kind {key} to {out}.",
        (
            f"sqlite3 {database} .schema",
            f"sqlite3 {database} \"select sum(price) from {table} where kind='{key}'\" > {out}",
        ),
        (f"sqlite3 {database} 'select sum(price) from {table}' > {out}",),
        (answer(out, total),),
        setup=setup,
        answer=str(total),
    )


def sqlite_edit(draw: Draw) -> Spec:
    base, table, second, *words = draw.words(6, 4)
    database = f"{base}.db"

    def dump(name: str) -> str:
        return f"sqlite3 {database} 'select * from {name} order by 1'"

    names = f"sqlite3 {database} \"select name from sqlite_master where type='table'\""
    setup = _table(database, table, "word text", [f"'{w}'" for w in words])
    if draw.difficulty == 1:
        keep = _table(database, second, "word text", [f"'{w}'" for w in words[:2]])
        kept = same(dump(second), "\n".join(sorted(words[:2])))
        wording, solution, near, check = draw.choice(
            (
                (
                    "Drop table {t} of {d}.",
                    f"drop table {table}",
                    f"delete from {table}",
                    same(names, second),
                ),
                (
                    "Delete all rows of table {t} in {d}.",
                    f"delete from {table}",
                    f"delete from {second}",
                    same(f"sqlite3 {database} 'select count(*) from {table}'", "0"),
                ),
            )
        )
        return Spec(
            wording.format(t=table, d=database),
            (f"sqlite3 {database} '{solution}'",),
            (f"sqlite3 {database} '{near}'",),
            (check, kept),
            setup=f"{setup}\n{keep}",
        )
    if draw.difficulty == 2:
        new = draw.word()
        return Spec(
            draw.choice(
                ("In {d}, add a row {w} to table {t}.", "Insert {w} into table {t} of {d}.")
            ).format(d=database, w=new, t=table),
            (f"sqlite3 {database} \"insert into {table} values('{new}')\"",),
            (f"sqlite3 {database} \"update {table} set word='{new}'\"",),
            (same(dump(table), "\n".join(sorted([*words, new]))),),
            setup=setup,
        )
    step, values = draw.number(2, 20), draw.numbers(3, 10, 90)
    rows = [f"'{w}',{v}" for w, v in zip(words, values, strict=True)]
    want = sorted(f"{w}|{v + step * (v == values[0])}" for w, v in zip(words, values, strict=True))
    return Spec(
        f"In {database}, raise the price of {words[0]} in table {table} by {step}.",
        (
            f"sqlite3 {database} .schema",
            f"sqlite3 {database} \"update {table} set price=price+{step} where name='{words[0]}'\"",
        ),
        (f"sqlite3 {database} 'update {table} set price=price+{step}'",),
        (same(dump(table), "\n".join(want)),),
        setup=_table(database, table, "name text, price int", rows),
    )


FAMILIES = (
    Family("git_commit", "commit, selectively and back in time", git_commit, ("git",)),
    Family("git_branch", "branches, merges and history", git_branch, ("git",)),
    Family("sqlite_query", "queries into files", sqlite_query, ("sqlite3",)),
    Family("sqlite_edit", "drop, delete, insert and update", sqlite_edit, ("sqlite3",)),
)
