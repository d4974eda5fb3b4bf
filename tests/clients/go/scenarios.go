// Package scenarios runs the list of ../scenarios.txt through one of Google's Go clients.
package scenarios

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/api/option"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
)

const (
	// Soon is the longest wait for anything that should happen at once.
	Soon = 60 * time.Second
	// Outage is the longest wait for a server that comes back, and for a message whose lease went down with it.
	Outage = 4 * time.Minute
	// Longest is the longest run of one scenario.
	Longest = 14 * time.Minute
	streams = 20
	// Longer than three minutes, after which many a proxy forgets a connection that nobody uses.
	idleTime = 190 * time.Second
	kills    = 3
	// Messages whose publish is confirmed between two kills.
	betweenKills = 100
)

// AvroSchema is the schema of the schema scenario.
const AvroSchema = `{"type": "record", "name": "Order", "fields": [{"name": "id", "type": "int"}]}`

// SchemaOptions are for the clients for schemas: they don't look at PUBSUB_EMULATOR_HOST.
func SchemaOptions() []option.ClientOption {
	return []option.ClientOption{
		option.WithEndpoint(os.Getenv("PUBSUB_EMULATOR_HOST")),
		option.WithoutAuthentication(),
		option.WithGRPCDialOption(grpc.WithTransportCredentials(insecure.NewCredentials())),
	}
}

// Options of a subscription.
type Options struct {
	Ordered, ExactlyOnce, RetainAcked bool
	Filter, DeadLetterTopic           string
}

// Message is a received or published message.
type Message struct {
	ID, Key    string
	Data       []byte
	Attributes map[string]string
	Attempt    int
	Ack, Nack  func()
	// AckConfirmed answers whether the server confirmed the ack.
	AckConfirmed func(context.Context) (bool, error)
}

// Shown is what the scenario of updates looks at.
type Shown struct {
	AckDeadlineSeconds int
	Label              string
}

// Client is what the two versions of the client have in common. Names are ids.
type Client interface {
	CreateTopic(ctx context.Context, topic, avroSchema string) error
	// UseTopic takes a topic for publishing that exists, or fails.
	UseTopic(ctx context.Context, topic string) error
	// Compress has requests of the topic compressed.
	Compress(topic string)
	// Update changes the ack deadline and the label `team`, and answers what is shown then.
	Update(ctx context.Context, subscription string, to Shown) (Shown, error)
	// AddMember gives a role on a topic, and answers the members that are shown then.
	AddMember(ctx context.Context, topic, role, member string) ([]string, error)
	TestPermissions(ctx context.Context, topic string, permissions []string) ([]string, error)
	CreateSubscription(ctx context.Context, subscription, topic string, options Options) error
	// Publish answers a function that waits for the id.
	Publish(ctx context.Context, topic string, message Message) func() (string, error)
	Receive(ctx context.Context, subscription string, maxOutstanding int, handle func(Message)) error
	Seek(ctx context.Context, subscription string, to time.Time) error
	Snapshot(ctx context.Context, subscription, snapshot string) error
	SeekSnapshot(ctx context.Context, subscription, snapshot string) error
	Detach(ctx context.Context, subscription string) (shown bool, err error)
	Close() error
}

// Connect makes a client.
type Connect func(ctx context.Context, project string, options ...option.ClientOption) (Client, error)

type run struct {
	Client
	ctx     context.Context
	connect Connect
}

var all = map[string]func(*run) error{
	"batch": batch, "ordered": ordered, "compressed": compressed, "large": large, "flow_control": flowControl,
	"many_streams": manyStreams, "nack": nack, "extend": extend, "exactly_once": exactlyOnce, "lost_lease": lostLease,
	"dead_letter": deadLetter, "filter": filter, "seek": seek, "snapshot": snapshot, "detach": detach, "update": update,
	"schema": schema, "iam": iam, "idle": idle, "reconnect": reconnect, "key": key, "kill": kill,
}

// Main runs the scenarios named as arguments and prints a line for each.
func Main(connect Connect) {
	for _, name := range os.Args[1:] {
		scenario, known := all[name]
		if !known {
			fmt.Println("absent", name)
			continue
		}
		if err := one(connect, name, scenario); err != nil {
			fmt.Println("failed", name, strings.ReplaceAll(err.Error(), "\n", " "))
		} else {
			fmt.Println("ok", name)
		}
	}
}

func one(connect Connect, name string, scenario func(*run) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), Longest)
	defer cancel()
	if name == "key" {
		return scenario(&run{nil, ctx, connect})
	}
	client, err := connect(ctx, project())
	if err != nil {
		return err
	}
	defer client.Close()
	return scenario(&run{client, ctx, connect})
}

func project() string { return fmt.Sprintf("project-%08x", rand.Uint32()) }

// pair creates the topic and the subscription.
func (r *run) pair(options Options) error {
	if err := r.CreateTopic(r.ctx, "orders", ""); err != nil {
		return err
	}
	return r.CreateSubscription(r.ctx, "billing", "orders", options)
}

// publish sends texts and answers their ids.
func (r *run) publish(messages ...Message) ([]string, error) {
	var waits []func() (string, error)
	for _, m := range messages {
		waits = append(waits, r.Publish(r.ctx, "orders", m))
	}
	var ids []string
	for _, wait := range waits {
		id, err := wait()
		if err != nil {
			return nil, err
		}
		ids = append(ids, id)
	}
	return ids, nil
}

func texts(count int, prefix string) (messages []Message) {
	for n := range count {
		messages = append(messages, Message{Data: fmt.Appendf(nil, "%s%d", prefix, n)})
	}
	return
}

// inbox collects what a subscription delivers until it is closed.
type inbox struct {
	messages chan Message
	stop     context.CancelFunc
	ended    chan error
}

func (r *run) open(subscription string, maxOutstanding int, handle func(Message)) *inbox {
	ctx, stop := context.WithCancel(r.ctx)
	in := &inbox{make(chan Message, 100_000), stop, make(chan error, 1)}
	go func() {
		in.ended <- r.Receive(ctx, subscription, maxOutstanding, func(m Message) {
			handle(m)
			in.messages <- m
		})
	}()
	return in
}

func (in *inbox) take(count int) (taken []Message, err error) {
	late := time.After(Soon)
	for len(taken) < count {
		select {
		case m := <-in.messages:
			taken = append(taken, m)
		case err := <-in.ended:
			return nil, fmt.Errorf("the stream ended after %d of %d messages: %w", len(taken), count, err)
		case <-late:
			return nil, fmt.Errorf("%d of %d messages came", len(taken), count)
		}
	}
	return
}

func (in *inbox) close() error {
	in.stop()
	return <-in.ended
}

func ack(m Message)     { m.Ack() }
func nothing(_ Message) {}

// same compares what came with what was expected, in any order.
func same(got []Message, ids []string) error {
	var seen []string
	for _, m := range got {
		seen = append(seen, m.ID)
	}
	slices.Sort(seen)
	ids = slices.Sorted(slices.Values(ids))
	if !slices.Equal(seen, ids) {
		return fmt.Errorf("%d messages %.200v instead of %d %.200v", len(seen), fmt.Sprint(seen), len(ids), fmt.Sprint(ids))
	}
	return nil
}

func batch(r *run) error {
	if err := r.pair(Options{}); err != nil {
		return err
	}
	ids, err := r.publish(texts(1000, "")...)
	if err != nil {
		return err
	}
	in := r.open("billing", 0, ack)
	got, err := in.take(1000)
	if err != nil {
		return err
	}
	return errors.Join(same(got, ids), in.close())
}

func ordered(r *run) error {
	if err := r.pair(Options{Ordered: true}); err != nil {
		return err
	}
	var messages []Message
	for n := range 50 {
		for _, key := range []string{"a", "b", "c"} {
			messages = append(messages, Message{Data: fmt.Append(nil, n), Key: key})
		}
	}
	in := r.open("billing", 0, ack)
	if _, err := r.publish(messages...); err != nil {
		return err
	}
	got, err := in.take(150)
	if err != nil {
		return err
	}
	next := map[string]int{}
	for _, m := range got {
		if string(m.Data) != fmt.Sprint(next[m.Key]) {
			return fmt.Errorf("%s instead of %d of key %s", m.Data, next[m.Key], m.Key)
		}
		next[m.Key]++
	}
	return in.close()
}

func compressed(r *run) error {
	if err := r.pair(Options{}); err != nil {
		return err
	}
	r.Compress("orders")
	data := bytes.Repeat([]byte("x"), 5_000)
	ids, err := r.publish(slices.Repeat([]Message{{Data: data}}, 20)...)
	if err != nil {
		return err
	}
	in := r.open("billing", 0, ack)
	got, err := in.take(20)
	if err != nil {
		return err
	}
	for _, m := range got {
		if !bytes.Equal(m.Data, data) {
			return fmt.Errorf("%d other bytes came", len(m.Data))
		}
	}
	return errors.Join(same(got, ids), in.close())
}

func large(r *run) error {
	if err := r.pair(Options{}); err != nil {
		return err
	}
	data := bytes.Repeat([]byte("x"), 9_999_000)
	if _, err := r.publish(Message{Data: data}); err != nil {
		return err
	}
	in := r.open("billing", 0, ack)
	got, err := in.take(1)
	if err != nil {
		return err
	}
	if !bytes.Equal(got[0].Data, data) {
		return fmt.Errorf("%d other bytes came", len(got[0].Data))
	}
	return in.close()
}

func flowControl(r *run) error {
	if err := r.pair(Options{}); err != nil {
		return err
	}
	ids, err := r.publish(texts(200, "")...)
	if err != nil {
		return err
	}
	var mutex sync.Mutex
	now, most := 0, 0
	in := r.open("billing", 10, func(m Message) {
		mutex.Lock()
		now++
		most = max(most, now)
		mutex.Unlock()
		time.Sleep(2 * time.Millisecond)
		mutex.Lock()
		now--
		mutex.Unlock()
		m.Ack()
	})
	got, err := in.take(200)
	if err != nil {
		return err
	}
	if most > 10 {
		return fmt.Errorf("%d messages were under way", most)
	}
	return errors.Join(same(got, ids), in.close())
}

func manyStreams(r *run) error {
	if err := r.pair(Options{}); err != nil {
		return err
	}
	all := make(chan Message, 100_000)
	var opened []*inbox
	for range streams {
		opened = append(opened, r.open("billing", 0, func(m Message) {
			m.Ack()
			all <- m
		}))
	}
	ids, err := r.publish(texts(1000, "")...)
	if err != nil {
		return err
	}
	got, err := (&inbox{all, nil, nil}).take(1000)
	if err != nil {
		return err
	}
	for _, in := range opened {
		err = errors.Join(err, in.close())
	}
	return errors.Join(err, same(got, ids))
}

func nack(r *run) error {
	if err := r.pair(Options{}); err != nil {
		return err
	}
	ids, err := r.publish(texts(1, "m")...)
	if err != nil {
		return err
	}
	var once sync.Once
	in := r.open("billing", 0, func(m Message) {
		settle := m.Ack
		once.Do(func() { settle = m.Nack })
		settle()
	})
	got, err := in.take(2)
	if err != nil {
		return err
	}
	return errors.Join(same(got, append(ids, ids...)), in.close())
}

func extend(r *run) error {
	if err := r.pair(Options{}); err != nil {
		return err
	}
	if _, err := r.publish(texts(1, "m")...); err != nil {
		return err
	}
	in := r.open("billing", 0, func(m Message) {
		time.Sleep(14 * time.Second)
		m.Ack()
	})
	if _, err := in.take(1); err != nil {
		return err
	}
	time.Sleep(time.Second)
	if len(in.messages) > 0 {
		return errors.New("the message came again meanwhile")
	}
	return in.close()
}

// confirmed receives messages whose acks the server must confirm.
func (r *run) confirmed(count int) ([]Message, error) {
	failures := make(chan error, 100_000)
	in := r.open("billing", 0, func(m Message) {
		done, err := m.AckConfirmed(r.ctx)
		if !done {
			failures <- fmt.Errorf("an ack was not confirmed: %w", err)
		}
	})
	got, err := in.take(count)
	if err != nil {
		return nil, err
	}
	if err := in.close(); err != nil {
		return nil, err
	}
	select {
	case err := <-failures:
		return nil, err
	default:
		return got, nil
	}
}

func exactlyOnce(r *run) error {
	if err := r.pair(Options{ExactlyOnce: true}); err != nil {
		return err
	}
	ids, err := r.publish(texts(50, "")...)
	if err != nil {
		return err
	}
	got, err := r.confirmed(50)
	if err != nil {
		return err
	}
	return same(got, ids)
}

func lostLease(r *run) error {
	if err := r.pair(Options{ExactlyOnce: true, RetainAcked: true}); err != nil {
		return err
	}
	ids, err := r.publish(texts(2, "m")...)
	if err != nil {
		return err
	}
	in := r.open("billing", 0, nothing)
	held, err := in.take(2)
	if err != nil {
		return err
	}
	if done, err := held[0].AckConfirmed(r.ctx); !done {
		return fmt.Errorf("an ack was not confirmed: %w", err)
	}
	// A seek ends every lease behind the client's back.
	if err := r.Seek(r.ctx, "billing", time.Now().Add(-time.Hour)); err != nil {
		return err
	}
	if done, _ := held[1].AckConfirmed(r.ctx); done {
		return errors.New("the ack of a lost lease was confirmed")
	}
	again, err := in.take(2)
	if err != nil {
		return err
	}
	for _, m := range again {
		if done, err := m.AckConfirmed(r.ctx); !done {
			return fmt.Errorf("an ack after the seek was not confirmed: %w", err)
		}
	}
	return errors.Join(same(again, ids), in.close())
}

func deadLetter(r *run) error {
	if err := r.CreateTopic(r.ctx, "dead", ""); err != nil {
		return err
	}
	if err := r.CreateSubscription(r.ctx, "graveyard", "dead", Options{}); err != nil {
		return err
	}
	if err := r.pair(Options{DeadLetterTopic: "dead"}); err != nil {
		return err
	}
	if _, err := r.publish(texts(1, "m")...); err != nil {
		return err
	}
	in := r.open("billing", 0, func(m Message) { m.Nack() })
	got, err := in.take(5)
	if err != nil {
		return err
	}
	for n, m := range got {
		if m.Attempt != n+1 {
			return fmt.Errorf("attempt %d instead of %d", m.Attempt, n+1)
		}
	}
	graveyard := r.open("graveyard", 0, ack)
	buried, err := graveyard.take(1)
	if err != nil {
		return err
	}
	if count := buried[0].Attributes["CloudPubSubDeadLetterSourceDeliveryCount"]; count != "5" {
		return fmt.Errorf("a delivery count of %q", count)
	}
	return errors.Join(in.close(), graveyard.close())
}

func filter(r *run) error {
	if err := r.pair(Options{Filter: `attributes.color = "red"`}); err != nil {
		return err
	}
	var messages []Message
	for n := range 20 {
		color := []string{"red", "blue"}[n%2]
		messages = append(messages, Message{Data: []byte("x"), Attributes: map[string]string{"color": color}})
	}
	ids, err := r.publish(messages...)
	if err != nil {
		return err
	}
	var red []string
	for n := 0; n < len(ids); n += 2 {
		red = append(red, ids[n])
	}
	in := r.open("billing", 0, ack)
	got, err := in.take(10)
	if err != nil {
		return err
	}
	return errors.Join(same(got, red), in.close())
}

func seek(r *run) error {
	return rewound(r, func() error { return r.Seek(r.ctx, "billing", time.Now().Add(-time.Hour)) })
}

func snapshot(r *run) error {
	return rewound(r, func() error { return r.SeekSnapshot(r.ctx, "billing", "before") })
}

func rewound(r *run, rewind func() error) error {
	if err := r.pair(Options{RetainAcked: true}); err != nil {
		return err
	}
	if err := r.Snapshot(r.ctx, "billing", "before"); err != nil {
		return err
	}
	ids, err := r.publish(texts(3, "m")...)
	if err != nil {
		return err
	}
	in := r.open("billing", 0, ack)
	if _, err := in.take(3); err != nil {
		return err
	}
	if err := rewind(); err != nil {
		return err
	}
	got, err := in.take(3)
	if err != nil {
		return err
	}
	return errors.Join(same(got, ids), in.close())
}

func detach(r *run) error {
	if err := r.pair(Options{}); err != nil {
		return err
	}
	shown, err := r.Detach(r.ctx, "billing")
	if err != nil {
		return err
	}
	if !shown {
		return errors.New("the subscription does not show it")
	}
	err = r.Receive(r.ctx, "billing", 0, ack)
	if status.Code(err) != codes.FailedPrecondition {
		return fmt.Errorf("receiving ended with %w", err)
	}
	return nil
}

func schema(r *run) error {
	if err := r.CreateTopic(r.ctx, "orders", AvroSchema); err != nil {
		return err
	}
	if _, err := r.publish(Message{Data: []byte(`{"id": 1}`)}); err != nil {
		return err
	}
	_, err := r.publish(Message{Data: []byte(`{"id": "one"}`)})
	if status.Code(err) != codes.InvalidArgument {
		return fmt.Errorf("a message against the schema was answered with %w", err)
	}
	return nil
}

func update(r *run) error {
	if err := r.pair(Options{Filter: `attributes.color = "red"`}); err != nil {
		return err
	}
	to := Shown{42, "b"}
	shown, err := r.Update(r.ctx, "billing", to)
	if err == nil && shown != to {
		err = fmt.Errorf("%v is shown", shown)
	}
	return err
}

func iam(r *run) error {
	if err := r.pair(Options{}); err != nil {
		return err
	}
	member := "user:jane@shop.example"
	members, err := r.AddMember(r.ctx, "orders", "roles/pubsub.viewer", member)
	if err != nil {
		return err
	}
	if !slices.Equal(members, []string{member}) {
		return fmt.Errorf("the members are %v", members)
	}
	wanted := []string{"pubsub.topics.get", "pubsub.topics.publish"}
	tested, err := r.TestPermissions(r.ctx, "orders", wanted)
	if slices.Sort(tested); err == nil && !slices.Equal(tested, wanted) {
		err = fmt.Errorf("the permissions are %v", tested)
	}
	return err
}

func idle(r *run) error {
	if err := r.pair(Options{}); err != nil {
		return err
	}
	in := r.open("billing", 0, ack)
	time.Sleep(idleTime)
	before := time.Now()
	if _, err := r.publish(texts(1, "m")...); err != nil {
		return err
	}
	if _, err := in.take(1); err != nil {
		return err
	}
	if took := time.Since(before); took > 15*time.Second {
		return fmt.Errorf("it took %v", took)
	}
	return in.close()
}

// reconnect goes on while the server closes each stream after about 3 s.
func reconnect(r *run) error {
	if err := r.pair(Options{}); err != nil {
		return err
	}
	in := r.open("billing", 0, ack)
	var ids []string
	for range 24 {
		more, err := r.publish(texts(1, "m")...)
		if err != nil {
			return err
		}
		ids = append(ids, more...)
		time.Sleep(500 * time.Millisecond)
	}
	got, err := in.take(24)
	if err != nil {
		return err
	}
	return errors.Join(same(got, ids), in.close())
}

func get(variable string) error {
	answer, err := http.Get(os.Getenv(variable))
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if answer.StatusCode != 200 {
		return fmt.Errorf("%s answered %s", variable, answer.Status)
	}
	return nil
}

// account is what is known of messages while servers are killed.
type account struct {
	sync.Mutex
	confirmed, received, acked, returned map[string]bool
}

func (a *account) note(of map[string]bool, id string) {
	a.Lock()
	defer a.Unlock()
	of[id] = true
}

func (a *account) receive(id string) {
	a.Lock()
	defer a.Unlock()
	a.received[id] = true
	if a.acked[id] {
		a.returned[id] = true
	}
}

// published counts the confirmed publishes, and those of them that never came. Not all acks are confirmed: the answer to one
// that was carried out may be lost with its server.
func (a *account) published() (all, missing int) {
	a.Lock()
	defer a.Unlock()
	for id := range a.confirmed {
		if !a.received[id] {
			missing++
		}
	}
	return len(a.confirmed), missing
}

// waitUntil waits for a condition, or for an error.
func waitUntil(what string, condition func() (bool, error)) error {
	until := time.Now().Add(Outage)
	for {
		done, err := condition()
		if done || err != nil {
			return err
		}
		if time.Now().After(until) {
			return fmt.Errorf("waited in vain for %s", what)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// kill publishes, receives and acks while servers are killed, and notes every ack that was confirmed.
func kill(r *run) error {
	if err := r.pair(Options{ExactlyOnce: true}); err != nil {
		return err
	}
	a := &account{confirmed: map[string]bool{}, received: map[string]bool{}, acked: map[string]bool{}, returned: map[string]bool{}}
	in := r.open("billing", 0, func(m Message) {
		a.receive(m.ID)
		if done, _ := m.AckConfirmed(r.ctx); done {
			a.note(a.acked, m.ID)
		}
	})
	var stop atomic.Bool
	var failure atomic.Value
	var publishers sync.WaitGroup
	for range 4 {
		publishers.Go(func() {
			// The client repeats what fails meanwhile.
			for !stop.Load() {
				ids, err := r.publish(texts(1, "m")...)
				if err != nil {
					failure.Store(err)
					return
				}
				a.note(a.confirmed, ids[0])
			}
		})
	}
	more := func() error {
		before, _ := a.published()
		return waitUntil("confirmed publishes", func() (bool, error) {
			now, _ := a.published()
			err, _ := failure.Load().(error)
			return now >= before+betweenKills, err
		})
	}
	err := more()
	for n := 0; n < kills && err == nil; n++ {
		if err = get("LANDLINE_DISTURB"); err == nil {
			err = more()
		}
	}
	stop.Store(true)
	publishers.Wait()
	if err != nil {
		return err
	}
	err = waitUntil("the messages that are missing", func() (bool, error) {
		_, missing := a.published()
		return missing == 0, nil
	})
	if len(a.returned) > 0 {
		err = errors.Join(err, fmt.Errorf("%d messages came after their confirmed ack", len(a.returned)))
	}
	return errors.Join(err, in.close())
}

func key(r *run) error {
	project := project()
	address := option.WithEndpoint(os.Getenv("LANDLINE_ADDRESS"))
	of := func(name string) (*run, error) {
		file := filepath.Join(os.Getenv("LANDLINE_KEYS"), name+".json")
		client, err := r.connect(r.ctx, project, address, option.WithAuthCredentialsFile(option.ServiceAccount, file))
		return &run{client, r.ctx, r.connect}, err
	}
	admin, err := of("admin")
	if err != nil {
		return err
	}
	defer admin.Close()
	if err := admin.pair(Options{}); err != nil {
		return err
	}
	ids, err := admin.publish(texts(1, "m")...)
	if err != nil {
		return err
	}
	in := admin.open("billing", 0, ack)
	got, err := in.take(1)
	if err != nil {
		return err
	}
	if err := errors.Join(same(got, ids), in.close()); err != nil {
		return err
	}
	reader, err := of("reader")
	if err != nil {
		return err
	}
	defer reader.Close()
	if err := reader.UseTopic(r.ctx, "orders"); err != nil {
		return err
	}
	_, err = reader.publish(texts(1, "m")...)
	if err := expect(err, codes.PermissionDenied, "pubsub.topics.publish"); err != nil {
		return err
	}
	nobody, err := r.connect(r.ctx, project, address, option.WithoutAuthentication())
	if err != nil {
		return err
	}
	defer nobody.Close()
	if err := expect(nobody.UseTopic(r.ctx, "orders"), codes.Unauthenticated, ""); err != nil {
		return err
	}
	if err := get("LANDLINE_DELETE_KEY"); err != nil {
		return err
	}
	return waitUntil("the end of the deleted key", func() (bool, error) {
		err := admin.UseTopic(r.ctx, "orders")
		if err == nil {
			return false, nil
		}
		return true, expect(err, codes.Unauthenticated, "")
	})
}

func expect(err error, code codes.Code, text string) error {
	if status.Code(err) != code || !strings.Contains(err.Error(), text) {
		return fmt.Errorf("instead of %v: %w", code, err)
	}
	return nil
}
