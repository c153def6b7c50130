import subprocess

from mlm.training.summary import git_commit


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_commit_of_the_code(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert git_commit(package) is None
    git(tmp_path, "init")
    assert git_commit(package) is None  # the checkout is somebody else's
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    commit = (tmp_path / ".git" / "refs" / "heads").glob("*")
    (head,) = (path.read_text().strip() for path in commit)
    assert git_commit(package) == head
    (package / "__init__.py").write_text("x = 1")
    assert git_commit(package) == f"{head}-dirty"
    assert git_commit(tmp_path / "nowhere") is None
