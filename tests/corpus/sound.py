"""Small tasks of every style that are sound: no gate may raise an alarm."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.corpus.write import Files, by_bash, by_pytest, by_script, changed, managed, tarred, task

WORDS = """
    pear
    fig
    plum
    fig
    apple
    pear
    fig
    """
SALES = """
    region,item,amount
    north,lamp,12
    south,desk,30
    north,desk,8
    east,lamp,5
    south,lamp,7
    """
LOG = """
        09:00 INFO start
        09:01 ERROR disk full on sda
        09:02 WARN slow
        09:05 ERROR link down on eth0
        09:07 INFO retry
        09:09 ERROR disk full on sdb
        """
GIT = 'export HOME=/root; git config --global user.name "Dev"; git config --global user.email dev@example.org; '
REPOSITORY = (
    f"RUN {GIT} git config --global init.defaultBranch main; git init -q . && git add . && git commit -qm start\n"
)


# ---- files in, files out


def sort_lines() -> Files:
    return task(
        "Sort the lines of words.txt into sorted.txt.\n",
        "sort words.txt > sorted.txt\n",
        managed(
            r"""
                from verify import check_text


                def test_sorted():
                    check_text('sorted.txt', 'apple\nfig\nfig\nfig\npear\npear\nplum')
                """
        ),
        {"words.txt": WORDS},
    )


def count_words() -> Files:
    return task(
        """
            Write how often each word of words.txt occurs to counts.txt, most frequent first, as
            `WORD COUNT`; words that occur equally often go in alphabetical order.
            """,
        "sort words.txt | uniq -c | sort -k1,1nr -k2 | awk '{ print $2, $1 }' > counts.txt\n",
        by_bash("""has counts.txt $'fig 3\\npear 2\\napple 1\\nplum 1'"""),
        {"words.txt": WORDS},
    )


def totals_by_region() -> Files:
    return task(
        "sales.csv has sales by region. Write totals.json: an object of region to the sum of its amounts.\n",
        """
            python3 - <<'PY'
            import csv, json
            totals = {}
            for row in csv.DictReader(open('sales.csv')):
                totals[row['region']] = totals.get(row['region'], 0) + int(row['amount'])
            json.dump(totals, open('totals.json', 'w'))
            PY
            """,
        by_pytest(
            """
                import json


                def test_totals():
                    assert json.load(open('/app/totals.json')) == {'north': 20, 'south': 37, 'east': 5}
                """
        ),
        {"sales.csv": SALES},
    )


def four_chores() -> Files:
    """Partial credit, a quarter each."""
    return task(
        """
            In /app: put the distinct words of words.txt, sorted, into distinct.txt; the first line of
            that into first.txt; the number of lines of words.txt into lines.txt; and remove words.txt.
            """,
        """
            sort -u words.txt > distinct.txt
            head -n 1 distinct.txt > first.txt
            grep -c '' words.txt > lines.txt
            rm words.txt
            """,
        by_bash(
            "has distinct.txt $'apple\\nfig\\npear\\nplum'",
            "has first.txt apple",
            "has lines.txt 7",
            "[ ! -e words.txt ]",
        ),
        {"words.txt": WORDS},
    )


def report_errors() -> Files:
    return task(
        "From app.log, write the messages of all ERROR lines (without time and level) to errors.txt, in their order.\n",
        "grep ' ERROR ' app.log | cut -d ' ' -f 3- > errors.txt\n",
        managed(
            """
                def test_errors():
                    lines = open('errors.txt').read().splitlines()
                    assert lines == ['disk full on sda', 'link down on eth0', 'disk full on sdb']
                """
        ),
        {"app.log": LOG},
    )


def rename_by_date() -> Files:
    return task(
        "Rename every note-DDMM.txt in /app/notes to MM-DD.txt.\n",
        """
            cd notes
            for f in note-????.txt; do n=${f#note-}; n=${n%.txt}; mv $f ${n:2:2}-${n:0:2}.txt; done
            """,
        by_bash("has notes/02-01.txt one", "has notes/11-30.txt two", '[ -z "$(ls notes | grep note)" ]'),
        {"notes/note-0102.txt": "one\n", "notes/note-3011.txt": "two\n"},
    )


def remove_empty_files() -> Files:
    return task(
        "Delete the empty files below /app/data, and nothing else.\n",
        "find data -type f -empty -delete\n",
        managed(
            """
                import os


                def test_no_file_is_empty():
                    found = [f for f in os.listdir('data') if not os.path.getsize('data/' + f)]
                    assert not found and sorted(os.listdir('data')) == ['a.txt', 'd.txt']
                """
        ),
        {"data/a.txt": "a\n", "data/b.txt": "", "data/c.txt": "", "data/d.txt": "d\n"},
    )


def fix_modes() -> Files:
    return task(
        """
            Make every script below /app/bin executable for its owner alone (0700), and keys.txt readable for its owner
            alone (0600).
            """,
        """
            chmod 700 bin/*.sh
            chmod 600 keys.txt
            """,
        by_bash(
            '[ "$(stat -c %a bin/up.sh)" = 700 ]',
            '[ "$(stat -c %a bin/down.sh)" = 700 ]',
            '[ "$(stat -c %a keys.txt)" = 600 ]',
        ),
        {"bin/up.sh": "echo up\n", "bin/down.sh": "echo down\n", "keys.txt": "k\n"},
    )


def link_current() -> Files:
    return task(
        "Make /app/current a symbolic link to the newest release below releases/, relative.\n",
        "ln -s releases/$(ls releases | sort -n | tail -n 1) current\n",
        managed("""
            from verify import check_link


            def test_link():
                check_link('current', 'releases/12')
            """),
        {"releases/9/app": "9\n", "releases/12/app": "12\n", "releases/3/app": "3\n"},
    )


def pack_sources() -> Files:
    return task(
        "Pack the .py files below src into sources.tar, with paths relative to src.\n",
        """
            cd src
            tar cf ../sources.tar $(find . -name '*.py' | sed 's#^./##' | sort)
            """,
        by_pytest(
            r"""
                import tarfile


                def test_members():
                    with tarfile.open('/app/sources.tar') as archive:
                        assert sorted(archive.getnames()) == ['lib/b.py', 'main.py']
                        assert archive.extractfile('lib/b.py').read() == b'B = 2\n'
                """
        ),
        {"src/main.py": "A = 1\n", "src/lib/b.py": "B = 2\n", "src/notes.md": "no\n"},
    )


def unpack_and_merge() -> Files:
    return task(
        "parts.tar holds the parts of a text. Join part1, part2 and part3 in this order into whole.txt.\n",
        """
            mkdir /tmp/parts
            tar xf parts.tar -C /tmp/parts
            cd /tmp/parts
            cat part1 part2 part3 > /app/whole.txt
            """,
        managed(
            r"""
                from verify import check_text


                def test_whole():
                    check_text('whole.txt', 'one\ntwo\nthree')
                """
        ),
        {"parts.tar": tarred({"part2": "two\n", "part1": "one\n", "part3": "three\n"})},
    )


def edit_a_setting() -> Files:
    return task(
        "In server.ini set port to 9090 and debug to off; leave all else as it is.\n",
        """
            sed -i 's/^port=.*/port=9090/' server.ini
            sed -i 's/^debug=.*/debug=off/' server.ini
            """,
        by_bash(
            "grep -qx port=9090 server.ini",
            "grep -qx debug=off server.ini",
            "grep -qx name=web server.ini",
            '[ "$(wc -l < server.ini)" = 3 ]',
            before="[ \"$(grep -c 'port=9090\\|debug=off' server.ini)\" = 2 ] || "
            "{ echo 0 >/logs/verifier/reward.txt; exit; }",
        ),
        {
            "server.ini": """
            name=web
            port=80
            debug=on
            """
        },
    )


def reshape_json() -> Files:
    return task(
        "users.json is a list of users. Write names.txt with the names of the active ones, sorted, one a line.\n",
        "jq -r '.[] | select(.active) | .name' users.json | sort > names.txt\n",
        by_bash("has names.txt $'ana\\nkim'"),
        {
            "users.json": '[{"name": "kim", "active": true}, {"name": "bo", "active": false}, '
            '{"name": "ana", "active": true}]\n'
        },
    )


def join_tables() -> Files:
    return task(
        "people.csv maps id to name, scores.csv id to score. Write ranking.csv with `name,score`, best first.\n",
        "join -t , <(sort people.csv) <(sort scores.csv) | sort -t , -k3,3nr | cut -d , -f 2,3 > ranking.csv\n",
        managed(
            r"""
                from verify import check_text


                def test_ranking():
                    check_text('ranking.csv', 'bo,91\nkim,70\nana,12')
                """
        ),
        {
            "people.csv": """
            1,ana
            2,bo
            3,kim
            """,
            "scores.csv": """
            3,70
            1,12
            2,91
            """,
        },
    )


def decode_message() -> Files:
    return task(
        "message.b64 is a base64 text of which every line was reversed first. Write the plain text to message.txt.\n",
        "base64 -d message.b64 | rev > message.txt\n",
        by_bash("has message.txt $'meet at noon\\nbring the maps'"),
        {"message.b64": "bm9vbiB0YSB0ZWVtCnNwYW0gZWh0IGduaXJiCg==\n"},
    )


def checksums() -> Files:
    return task(
        "Write SHA256SUMS for the files of /app/dist, as sha256sum prints them inside that folder, into it.\n",
        """
            cd dist
            sha256sum a.bin b.bin > /tmp/sums
            mv /tmp/sums SHA256SUMS
            """,
        by_script(
            """
                cd dist && [ "$(grep -c . SHA256SUMS)" = 2 ] && sha256sum -c --strict SHA256SUMS && r=1 || r=0
                echo $r > /logs/verifier/reward.txt
                """
        ),
        {"dist/a.bin": bytes(range(64)), "dist/b.bin": b"\xff\x00" * 9},
    )


def binary_header() -> Files:
    return task(
        "image.raw begins with 4 bytes of width and 4 of height, little-endian. Write `WIDTHxHEIGHT` to size.txt.\n",
        """
            python3 - > size.txt <<'PY'
            import struct
            print(*struct.unpack("<II", open("image.raw", "rb").read(8)), sep="x")
            PY
            """,
        managed("""
            from verify import check_text


            def test_size():
                check_text('size.txt', '640x48')
            """),
        {"image.raw": (640).to_bytes(4, "little") + (48).to_bytes(4, "little") + bytes(100)},
    )


def names_beyond_ascii() -> Files:
    return task(
        "Put the lines of grüße.txt in reverse order into ausgabe/größe.txt.\n",
        """
            mkdir ausgabe
            tac grüße.txt > ausgabe/größe.txt
            """,
        managed(r"""
            def test_text():
                assert open('ausgabe/größe.txt', encoding='utf-8').read() == 'süß\nblau\n'
            """),
        {
            "grüße.txt": """
            blau
            süß
            """
        },
    )


def long_output() -> Files:
    return task(
        "Write the numbers from 1 to 40000, one a line, those that 7 divides left out, to numbers.txt.\n",
        "seq 40000 | awk '$1 % 7' > numbers.txt\n",
        by_bash('[ "$(wc -l < numbers.txt)" = 34286 ]', "diff -q numbers.txt <(seq 40000 | awk '$1 % 7')"),
    )


# ---- what could look like a leak and is none


def restore_backup() -> Files:
    return task(
        "app.conf was damaged. Restore it from the newest file below backup/.\n",
        "cp backup/$(ls backup | sort | tail -n 1) app.conf\n",
        managed(
            r"""
                from verify import check_text


                def test_conf():
                    check_text('app.conf', 'mode=steady\nsize=44')
                """
        ),
        {
            "app.conf": "mode=??\n",
            "backup/2024": """
            mode=old
            size=10
            """,
            "backup/2025": """
            mode=steady
            size=44
            """,
        },
    )


def say_hello() -> Files:
    return task(
        "Write the line `hello, wide world` to greeting.txt.\n",
        "echo 'hello, wide world' > greeting.txt\n",
        by_bash("has greeting.txt 'hello, wide world'"),
    )


def example_in_the_instruction() -> Files:
    return task(
        """
            Turn every `key: value` line of facts.txt into `key=value` in facts.env, keys in upper case. For example
            `colour: red` becomes `COLOUR=red`.
            """,
        "sed -E 's/^([a-z]+): (.*)$/\\U\\1\\E=\\2/' facts.txt > facts.env\n",
        by_bash("has facts.env $'SHAPE=round\\nWEIGHT=12 kg'"),
        {
            "facts.txt": """
            shape: round
            weight: 12 kg
            """
        },
    )


def marker_file() -> Files:
    """An output that is rightly empty."""
    return task(
        "Create an empty file /app/spool/READY, and move job.txt into /app/spool.\n",
        """
            mkdir -p spool
            mv job.txt spool/
            touch spool/READY
            """,
        by_bash("[ -f spool/READY ]", "has spool/job.txt 'run it'", "[ ! -e job.txt ]"),
        {"job.txt": "run it\n"},
    )


def already_sorted_input() -> Files:
    """The output equals an input, which the reference needs."""
    return task(
        "Sort numbers.txt numerically into sorted.txt.\n",
        "sort -n numbers.txt > sorted.txt\n",
        managed(
            r"""
                from verify import check_text


                def test_sorted():
                    check_text('sorted.txt', '1000\n2000\n3000')
                """
        ),
        {
            "numbers.txt": """
            1000
            2000
            3000
            """
        },
    )


# ---- programs that the verifier runs


def repair_a_program() -> Files:
    return task(
        "mean.py prints the mean of the numbers in a file, and is wrong for an even number of them. Repair it.\n",
        "sed -i 's#// len#/ len#' mean.py\n",
        by_bash(
            '[ "$(python3 -I mean.py /tests/even.txt)" = 2.5 ]',
            before='[ "$(python3 -I mean.py /tests/odd.txt)" = 2.0 ] || { echo 0 >/logs/verifier/reward.txt; exit; }',
        )
        | {
            "even.txt": """
            1
            2
            3
            4
            """,
            "odd.txt": """
            1
            2
            3
            """,
        },
        {
            "mean.py": (
                """
                import sys

                numbers = [float(line) for line in open(sys.argv[1])]
                print(sum(numbers) // len(numbers))
                """
            )
        },
    )


def write_a_script() -> Files:
    return task(
        "Write an executable /app/longest.sh that prints the longest line of the file it is given.\n",
        """
            cat > longest.sh <<'SH'
            #!/bin/bash
            awk 'length($0) > n { n = length($0); line = $0 } END { print line }' "$1"
            SH
            chmod +x longest.sh
            """,
        by_bash("[ \"$(./longest.sh /tests/a.txt)\" = 'a longer line' ]", '[ "$(./longest.sh /tests/b.txt)" = xyz ]')
        | {
            "a.txt": """
            short
            a longer line
            mid line
            """,
            "b.txt": """
            xyz
            abc
            """,
        },
    )


def program_without_rights() -> Files:
    """The verifier runs what the agent wrote as nobody, who may not write the reward."""
    return task(
        "Write /app/double.py: it reads a number from its standard input and prints twice that.\n",
        "echo 'print(2 * int(input()))' > double.py\n",
        by_script(
            """
                chmod 700 /logs/verifier; chmod -R a+rX /app
                said=$(cd / && echo 21 | setpriv --reuid=65534 --regid=65534 --clear-groups python3 -I /app/double.py)
                [ "$said" = 42 ] && r=1 || r=0
                rm -rf /logs/verifier/*; echo $r > /logs/verifier/reward.txt
                """
        ),
    )


def package_with_a_bug() -> Files:
    return task(
        "shop.price.total must add the tax once to the sum, not to every item and again. Mend it.\n",
        """
            python3 - <<'PY'
            path = 'shop/price.py'
            text = open(path).read()
            wrong = 'sum(p * (1 + tax) for p in prices)'
            open(path, 'w').write(text.replace(wrong, 'sum(prices)'))
            PY
            """,
        by_pytest(
            """
                import sys

                sys.path.append('/app')


                def test_total():
                    from shop.price import total

                    assert total([10, 20], 0.5) == 45 and total([], 0.5) == 0
                """
        ),
        {
            "shop/__init__.py": "",
            "shop/price.py": """
                def total(prices, tax):
                    return sum(p * (1 + tax) for p in prices) * (1 + tax)
                """,
        },
    )


# ---- services on the loopback


SERVER = """\
import json
from http.server import BaseHTTPRequestHandler, HTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"path": self.path, "length": len(self.path)}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)


HTTPServer(("127.0.0.1", 8123), Handler).serve_forever()
"""
ASK = """\
import json
import subprocess
import time
import urllib.request


def ask(path):
    for _ in range(200):
        try:
            with urllib.request.urlopen("http://127.0.0.1:8123" + path, timeout=2) as reply:
                return json.load(reply)
        except OSError:
            time.sleep(0.05)
    raise AssertionError("nobody answers on port 8123")


def test_answers():
    server = subprocess.Popen(["python3", "-I", "/app/server.py"])
    try:
        time.sleep(0.1)
        assert server.poll() is None, "server.py ended"
        assert ask("/abc") == {"path": "/abc", "length": 4}
        assert ask("/") == {"path": "/", "length": 1}
    finally:
        server.kill()
"""


def json_api() -> Files:
    return task(
        """
            Write /app/server.py: an HTTP server on 127.0.0.1:8123 that answers every GET with a JSON object of
            `path` (as it was asked) and `length` (its number of characters).
            """,
        f"cat > server.py <<'PY'\n{SERVER}PY\n",
        by_pytest(ASK),
    )


def configure_a_service() -> Files:
    return task(
        """
            service.py serves the greeting of greeting.conf on 127.0.0.1:8123. Make it say `good evening` on that
            port; it does not start as it is.
            """,
        """
            sed -i 's/^port=.*/port=8123/' greeting.conf
            sed -i 's/^text=.*/text=good evening/' greeting.conf
            """,
        by_script(
            """
                python3 -I service.py & server=$!
                said=
                for i in $(seq 100); do kill -0 $server 2>/dev/null || break
                said=$(exec 3<>/dev/tcp/127.0.0.1/8123 && cat <&3) 2>/dev/null && break; sleep 0.05; done
                kill $server 2>/dev/null
                [ "$said" = 'good evening' ] && r=1 || r=0
                echo $r > /logs/verifier/reward.txt
                """
        ),
        {
            "greeting.conf": """
                port=none
                text=hi
                """,
            "service.py": """
                import socket

                conf = dict(line.strip().split('=') for line in open('/app/greeting.conf'))
                server = socket.create_server(('127.0.0.1', int(conf['port'])))
                while True:
                    peer, _ = server.accept()
                    peer.sendall(conf['text'].encode())
                    peer.close()
                """,
        },
    )


# ---- databases


def _database(*statements: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "db")
        with sqlite3.connect(path) as connection:
            for statement in statements:
                connection.execute(statement)
        connection.close()
        return path.read_bytes()


SHOP = (
    "CREATE TABLE orders (id INTEGER, customer TEXT, cents INTEGER)",
    "INSERT INTO orders VALUES (1, 'ana', 250), (2, 'bo', 900), (3, 'ana', 50), (3, 'ana', 50)",
)


def fill_a_database() -> Files:
    return task(
        "Make shop.db (SQLite) with a table sales(region, item, amount) that holds the rows of sales.csv.\n",
        """
            python3 - <<'PY'
            import csv, sqlite3
            db = sqlite3.connect('shop.db')
            db.execute('CREATE TABLE sales (region TEXT, item TEXT, amount INTEGER)')
            rows = [tuple(row.values()) for row in csv.DictReader(open('sales.csv'))]
            db.executemany('INSERT INTO sales VALUES (?, ?, ?)', rows)
            db.commit()
            PY
            """,
        by_pytest(
            """
                import sqlite3


                def test_rows():
                    db = sqlite3.connect('/app/shop.db')
                    assert db.execute('SELECT count(*), sum(amount) FROM sales').fetchone() == (5, 62)
                    assert db.execute("SELECT amount FROM sales WHERE region = 'east'").fetchall() == [(5,)]
                """
        ),
        {"sales.csv": SALES},
    )


def query_a_database() -> Files:
    return task(
        """
            orders.db (SQLite) has a table orders(id, customer, cents). Write the sum of cents by customer to
            sums.txt, as `CUSTOMER SUM`, sorted by customer. An order that stands twice counts once.
            """,
        """
            python3 - > sums.txt <<'PY'
            import sqlite3
            rows = sqlite3.connect('orders.db').execute(
                'SELECT customer, sum(cents) FROM (SELECT DISTINCT * FROM orders) GROUP BY customer ORDER BY customer')
            for row in rows:
                print(*row)
            PY
            """,
        by_bash("has sums.txt $'ana 300\\nbo 900'"),
        {"orders.db": _database(*SHOP)},
    )


def clean_a_database() -> Files:
    return task(
        "One order stands twice in the table orders(id, customer, cents) of orders.db (SQLite). Delete the copy.\n",
        """
            python3 - <<'PY'
            import sqlite3
            db = sqlite3.connect('orders.db')
            db.execute('DELETE FROM orders WHERE rowid NOT IN (SELECT min(rowid) FROM orders GROUP BY id)')
            db.commit()
            PY
            """,
        managed(
            """
                import sqlite3


                def test_each_order_stands_once():
                    rows = sqlite3.connect('orders.db').execute('SELECT * FROM orders ORDER BY id')
                    assert rows.fetchall() == [(1, 'ana', 250), (2, 'bo', 900), (3, 'ana', 50)]
                """
        ),
        {"orders.db": _database(*SHOP)},
    )


# ---- git


def commit_a_change() -> Files:
    return task(
        "Set version to 2 in version.txt and commit that, on the current branch, with the message `release 2`.\n",
        """
            echo 2 > version.txt
            git commit -qam 'release 2'
            """,
        by_bash(
            "[ \"$(git log -1 --format=%s)\" = 'release 2' ]",
            '[ "$(git show HEAD:version.txt)" = 2 ]',
            before=GIT + "git config --global --add safe.directory '*'",
        ),
        {"version.txt": "1\n", "readme.txt": "tool\n"},
        REPOSITORY,
    )


def recover_from_history() -> Files:
    """What the history holds is the input here, not a leak."""
    return task(
        "notes.txt was deleted some commits ago. Bring its last state back into the working tree.\n",
        "git checkout -q $(git rev-list -n 1 HEAD -- notes.txt)^ -- notes.txt\n",
        managed(
            r"""
                from verify import check_text


                def test_notes():
                    check_text('notes.txt', 'first thought\nsecond thought')
                """
        ),
        {
            "notes.txt": """
            first thought
            second thought
            """,
            "other.txt": "x\n",
        },
        REPOSITORY
        + "RUN git rm -q notes.txt && git commit -qm 'tidy' && echo y >> other.txt && git commit -qam more\n",
    )


def merge_a_branch() -> Files:
    return task(
        "Merge the branch `colour` into main. Where both changed a line of settings.txt, colour is right.\n",
        "git merge -q -X theirs colour -m merged\n",
        by_bash(
            '[ "$(git rev-list --parents -n 1 main | wc -w)" = 3 ]',
            "has settings.txt $'ink=blue\\n\\nsize=A4\\n\\npaper=thick'",
            before="git config --global --add safe.directory '*'",
        ),
        {
            "settings.txt": """
            ink=black

            size=A4

            paper=thin
            """
        },
        REPOSITORY
        + "RUN git checkout -qb colour && sed -i s/black/blue/ settings.txt && git commit -qam blue\n"
        + "RUN git checkout -q main\n"
        + "RUN sed -i 's/black/grey/; s/thin/thick/' settings.txt && git commit -qam thick\n",
    )


# ---- places


def by_another_user() -> Files:
    return task(
        "Write the name of the user that you are to who.txt, in capital letters.\n",
        "whoami | tr a-z A-Z > who.txt\n",
        by_bash("has who.txt WORKER"),
        {"hint.txt": "see whoami(1)\n"},
        """
            RUN useradd -m worker && chown -R worker /app
            USER worker
            """,
    )


def fresh_file() -> Files:
    """Looks at the time of a file and at the clock, and is right on any day."""
    return task(
        "Write the current date as YYYY-MM-DD to today.txt.\n",
        "date +%F > today.txt\n",
        managed(
            """
                import os
                import time


                def test_today():
                    assert time.time() - os.path.getmtime('today.txt') < 86400
                    age = time.time() - time.mktime(time.strptime(open('today.txt').read().strip(), '%Y-%m-%d'))
                    assert -86400 < age < 3 * 86400
                """
        ),
    )


def pinned_hash_seed() -> Files:
    """The image says how Python hashes; that is the task's right."""
    return task(
        "Write the names of names.txt in the order in which `python3 bag.py` prints them to bag.txt.\n",
        "python3 bag.py > bag.txt\n",
        by_script(
            """
                [ "$(cat bag.txt)" = "$(cd /tests && python3 bag.py /app/names.txt)" ] && r=1 || r=0
                echo $r > /logs/verifier/reward.txt
                """,
            **{
                "bag.py": """
                import sys

                print(*set(open(sys.argv[1])), sep='', end='')
                """
            },
        ),
        {
            "names.txt": """
            ana
            bo
            kim
            lea
            mo
            """,
            "bag.py": "print(*set(open('names.txt')), sep='', end='')\n",
        },
        "ENV PYTHONHASHSEED=7\n",
    )


def as_many_as_cpus() -> Files:
    return task(
        "Square every number of numbers.txt, with as many processes as there are CPUs, into squares.txt, in order.\n",
        "xargs -P $(nproc) -I {} sh -c 'echo $(({} * {}))' < numbers.txt | sort -n > squares.txt\n",
        by_bash("has squares.txt $'4\\n9\\n25\\n49'"),
        {
            "numbers.txt": """
            2
            3
            5
            7
            """
        },
    )


def archive_made_in_the_build() -> Files:
    """Its bytes differ with every build, for tar keeps times; what it holds does not."""
    return task(
        "logs.tar.gz holds a log. Write the number of its lines to lines.txt.\n",
        "tar xzOf logs.tar.gz ./app.log | grep -c '' > lines.txt\n",
        by_bash("has lines.txt 6"),
        {"app.log": LOG},
        "RUN tar czf logs.tar.gz ./app.log && rm app.log\n",
    )


def solution_of_two_files() -> Files:
    plain = task(
        "Write the second largest number of numbers.txt to second.txt.\n",
        "python3 /solution/second.py > second.txt\n",
        by_bash("has second.txt 30"),
        {"numbers.txt": "12\n30\n7\n44\n"},
    )
    program = """
        numbers = sorted(int(line) for line in open('/app/numbers.txt'))
        print(numbers[-2])
        """
    return changed(plain, {"solution/second.py": program})


SOUND: dict[str, Callable[[], Files]] = {
    make.__name__: make
    for make in (
        sort_lines,
        count_words,
        totals_by_region,
        four_chores,
        report_errors,
        rename_by_date,
        remove_empty_files,
        fix_modes,
        link_current,
        pack_sources,
        unpack_and_merge,
        edit_a_setting,
        reshape_json,
        join_tables,
        decode_message,
        checksums,
        binary_header,
        names_beyond_ascii,
        long_output,
        restore_backup,
        say_hello,
        example_in_the_instruction,
        marker_file,
        already_sorted_input,
        repair_a_program,
        write_a_script,
        program_without_rights,
        package_with_a_bug,
        json_api,
        configure_a_service,
        fill_a_database,
        query_a_database,
        clean_a_database,
        commit_a_change,
        recover_from_history,
        merge_a_branch,
        by_another_user,
        fresh_file,
        pinned_hash_seed,
        as_many_as_cpus,
        archive_made_in_the_build,
        solution_of_two_files,
    )
}
